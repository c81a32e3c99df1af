package locks_test

import (
	"context"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/resource"
)

// TestShare also checks that a section's late write is refused despite its current token, and that on a FIFO lock a busy process
// doesn't starve another.
func TestShare(t *testing.T) {
	const ttl = 20 * time.Second
	for _, lock := range chaosLocks {
		t.Run(lock.name, func(t *testing.T) {
			t.Parallel()
			servers := lock.startServers(t)
			open := func() dlock.Backend {
				s := locks.Spec{TTL: ttl}
				for _, server := range servers {
					s.Addrs = append(s.Addrs, server.URL)
				}
				b, err := lock.open(t.Context(), s, rand.New(rand.NewPCG(1, 1)))
				require.NoError(t, err)
				t.Cleanup(func() { require.NoError(t, b.close()) })
				return b.Backend
			}
			l, err := dlock.New(open(), &dlock.Options{
				TTL: ttl, Renew: dlock.Renew{Every: ttl / 3, MaxHold: time.Hour},
				Share: dlock.Share{Sections: 3, For: time.Minute, Idle: time.Minute},
			})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, l.Close()) })

			store := resource.NewMemory()
			first, err := l.Acquire(t.Context(), "late")
			require.NoError(t, err)
			_, err = store.ReadFenced(t.Context(), "late", resource.NewFence(first.Next()))
			require.NoError(t, err)
			late := resource.NewFence(first.Next()) // for a write after the section's end
			require.NoError(t, first.Release(t.Context()))
			require.NoError(t, l.Do(t.Context(), "late", func(ctx context.Context, h *dlock.Handle) error {
				require.Equal(t, late.Token, h.Fence())
				_, err := store.ReadFenced(ctx, "late", resource.NewFence(h.Next()))
				require.NoError(t, err)
				require.ErrorContains(t, store.Write(ctx, "late", late, []byte("first")), "stale")
				return store.Write(ctx, "late", resource.NewFence(h.Next()), []byte("second"))
			}))

			if !slices.Contains([]string{locks.Redis, locks.Etcd, locks.ZooKeeper, "memory"}, lock.name) {
				return // no FIFO queue
			}
			var sections atomic.Int64
			var goroutines sync.WaitGroup
			busy, stop := context.WithCancel(t.Context())
			for range 4 {
				goroutines.Go(func() {
					for busy.Err() == nil {
						_ = l.Do(busy, "k", func(context.Context, *dlock.Handle) error {
							sections.Add(1)
							return nil
						})
					}
				})
			}
			other, err := dlock.New(open(), &dlock.Options{TTL: ttl})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, other.Close()) })
			soon, cancel := context.WithTimeout(t.Context(), 20*time.Second) // less than Share.For
			defer cancel()
			for n := int64(0); n < 20; {
				n = sections.Load()
				require.NoError(t, other.Do(soon, "k", func(context.Context, *dlock.Handle) error { return nil }))
			}
			stop()
			goroutines.Wait()
		})
	}
}
