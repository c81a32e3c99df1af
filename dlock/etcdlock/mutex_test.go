package etcdlock_test

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/etcdlock"
)

const mutexChild = "FENCELAB_TEST_MUTEX"

// standstill is what the child says when it has had no answer from etcd for about as long as the mutex waits for one. Any
// case may have failed then.
const standstill = "the machine or etcd stood still for"

// TestMutex runs the kit on etcd's own mutex in a child process, and compares which cases it fails.
func TestMutex(t *testing.T) {
	undisturbed(t, func(t *testing.T) (done bool) {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestMutexChild$", "-test.v", "-test.timeout=10m",
			// They need leases shorter than a second, or one request for an acquisition: it takes several.
			"-test.skip=/(RenewExtends|StartBeforeRequest|TokenMintedWithGrant)$")
		cmd.Env = append(os.Environ(), mutexChild+"=1")
		out, err := cmd.CombinedOutput()
		require.Error(t, err)
		var failed []string
		for _, m := range regexp.MustCompile(`--- FAIL: TestMutexChild/(\w+)`).FindAllSubmatch(out, -1) {
			failed = append(failed, string(m[1]))
		}
		slices.Sort(failed)
		want := []string{"Closed", "ReleaseByNonOwner", "RetrySameOwner", "WaiterOutlivesHolder"}
		if !slices.Equal(failed, want) && strings.Contains(string(out), standstill) {
			return false
		}
		require.Equal(t, want, failed, "%s", out)
		require.Contains(t, string(out), "--- PASS: TestMutexChild/TokensIncrease")
		return true
	})
}

func TestMutexChild(t *testing.T) {
	if os.Getenv(mutexChild) == "" {
		t.Skip("not applicable: TestMutex runs it")
	}
	h := harness(one, func(t *testing.T, c *clientv3.Client) dlock.Backend {
		b, err := etcdlock.NewMutex(c, nil)
		require.NoError(t, err)
		return b
	})
	h.ShortTTL = time.Second
	c := client(t, one, newLink())
	var pulse sync.WaitGroup
	pulse.Go(func() {
		for last := time.Now(); t.Context().Err() == nil; time.Sleep(10 * time.Millisecond) {
			_, _ = c.Put(t.Context(), "test/pulse", "")
			if d := time.Since(last); d > 500*time.Millisecond {
				fmt.Println(standstill, d)
			}
			last = time.Now()
		}
	})
	t.Cleanup(pulse.Wait)
	dlocktest.Run(t, h)
}

// What etcdlock is careful about: a Lock that fails after its put has been committed leaves its key in the queue.
func TestMutexLeavesItsKey(t *testing.T) {
	l := newLink()
	c := client(t, one, l)
	s, err := concurrency.NewSession(c)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	queue := "mutex/" + uuid.NewString()
	m, key := concurrency.NewMutex(s, queue), fmt.Sprintf("%s/%x", queue, s.Lease())
	ctx, cancel := context.WithCancel(t.Context())
	deliver := l.inject(holdReplies)
	failed := make(chan error, 1)
	go func() { failed <- m.Lock(ctx) }()
	other := client(t, one, newLink())
	require.Eventually(t, func() bool {
		resp, err := other.Get(t.Context(), key)
		return err == nil && len(resp.Kvs) == 1
	}, 30*time.Second, time.Millisecond)
	cancel()
	require.ErrorIs(t, <-failed, context.Canceled)
	deliver()
	require.ErrorIs(t, m.Unlock(t.Context()), concurrency.ErrLockReleased)
	resp, err := other.Get(t.Context(), key)
	require.NoError(t, err)
	require.Len(t, resp.Kvs, 1)
}
