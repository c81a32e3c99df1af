// Package jitter has pauses and random durations, which can be made repeatable.
package jitter

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"
)

var (
	mu     sync.Mutex
	seeded *rand.Rand
)

// Sleep returns after d, or with ctx's cause when that ends.
func Sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// N returns a random duration below d, which must be positive.
func N(d time.Duration) time.Duration {
	mu.Lock()
	defer mu.Unlock()
	if seeded == nil {
		return rand.N(d)
	}
	return time.Duration(seeded.Int64N(int64(d)))
}

// Seed makes N return the same sequence for the same seed from now on, in the whole process.
func Seed(seed uint64) {
	mu.Lock()
	defer mu.Unlock()
	seeded = rand.New(rand.NewPCG(seed, 0))
}
