package wait_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/internal/wait"
)

func TestQueues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var qs wait.Queues
		type joined struct {
			*wait.Queue
			err error
		}
		joins := func(ctx context.Context, key string, tolerance time.Duration) chan joined {
			c := make(chan joined, 1)
			go func() {
				q, err := qs.Join(ctx, key, tolerance)
				c <- joined{q, err}
			}()
			synctest.Wait()
			return c
		}
		waits := func(c chan joined) {
			synctest.Wait()
			require.Empty(t, c)
		}
		served := func(c chan joined) *wait.Queue {
			synctest.Wait()
			j := <-c
			require.NoError(t, j.err)
			return j.Queue
		}
		no := errors.New("no")
		first, other := served(joins(t.Context(), "a", time.Second)), served(joins(t.Context(), "b", time.Second))
		require.Equal(t, 2, qs.Len())
		ctx, cancel := context.WithCancelCause(t.Context())
		leaves, second := joins(ctx, "a", time.Second), joins(t.Context(), "a", time.Second)
		waits(leaves)
		waits(second)
		cancel(no)
		require.Equal(t, no, (<-leaves).err)
		waits(second)

		qs.Notify("a")
		qs.Notify("a") // once is enough
		qs.Notify("nobody waits")
		require.Len(t, first.Wake, 1)
		require.Empty(t, other.Wake)
		qs.NotifyAll()
		require.Len(t, other.Wake, 1)
		failing := time.Now()
		first.Failing = failing
		first.Leave()
		next := served(second)
		require.Equal(t, failing, next.Failing)
		require.Len(t, next.Wake, 1, "a notification isn't lost with its waiter")

		behind, last := joins(t.Context(), "a", time.Second), joins(t.Context(), "a", time.Second+1)
		time.Sleep(time.Second)
		next.Fail(failing.Add(1), no)
		waits(behind)
		next.Fail(failing, no)
		require.Equal(t, no, (<-behind).err)
		waits(last)
		time.Sleep(time.Nanosecond)
		next.Fail(failing, no)
		require.Equal(t, no, (<-last).err)
		last = joins(t.Context(), "a", time.Second)
		time.Sleep(time.Second - 1)
		next.Fail(failing, no)
		waits(last) // it has come since
		next.Leave()
		served(last).Leave()
		other.Leave()
		require.Zero(t, qs.Len())
	})
}
