// Package open provides this module's locks, stores and servers to package scenarios.
package open

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/scenarios"
)

// nodeTimeout is longer than a live node takes on a busy machine.
const nodeTimeout = 10 * time.Second

// variantCounters is a Redlock whose token is the greatest counter of its nodes.
const variantCounters = "counters"

// Lock opens a lock of this module.
var Lock = scenarios.FromBackend(backend)

func backend(ctx context.Context, s scenarios.LockSpec) (dlock.Backend, error) {
	spec := locks.Spec{Lock: s.Lock, Addrs: s.Addrs, TTL: s.TTL, MinSession: s.MinSession}
	counters := s.Variant == variantCounters
	switch {
	case s.Lock == locks.Redis || s.Gap != nil:
		return onredis.Backend(ctx, s)
	case s.Lock == locks.Redlock && (s.Variant == "" || counters):
		return locks.OpenRedlock(ctx, spec, &redlock.Options{NodeTimeout: nodeTimeout, UnsafeCounters: counters})
	case s.Variant == "":
		return locks.Open(ctx, spec)
	}
	return nil, fmt.Errorf("there is no variant %q of %s", s.Variant, s.Lock)
}
