package redislock

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

func (b *Backend) spin(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	for pause := b.o.Spin.Min; ; pause = min(2*pause, b.o.Spin.Max) {
		g, left, err := b.try(ctx, r)
		if !errors.Is(err, dlock.ErrHeld) && !redis.HasErrorPrefix(err, tryAgain) {
			return g, err
		}
		wait := pause/2 + rand.N(pause/2+1)
		if errors.Is(err, dlock.ErrHeld) && left >= 0 {
			wait = min(wait, left+time.Millisecond) // the lease is good to the end of its last millisecond
		}
		if err := b.wait(ctx, wait); err != nil {
			return dlock.Grant{}, err
		}
	}
}

func (b *Backend) wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("redislock: waiting: %w", context.Cause(ctx))
	case <-b.closed:
		return dlock.ErrClosed
	}
}
