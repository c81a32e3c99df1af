package main

import (
	"context"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onaws"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// says requires what fencelab fence prints, or its error.
func says(t *testing.T, want string, args ...string) {
	t.Helper()
	out, _, err := tool(t, append([]string{"fence"}, args...)...)
	if err != nil {
		out = err.Error()
	}
	require.Contains(t, out, want)
}

// Redis's counter is in testdata/fence.txtar.
func TestCounters(t *testing.T) {
	for lock, start := range map[string]func(context.Context, *testbed.Options) (*testbed.Server, error){
		locks.Postgres: testbed.StartPostgres, locks.S3: testbed.StartS3,
	} {
		t.Run(lock, func(t *testing.T) {
			s, err := start(t.Context(), &testbed.Options{AllowEmbedded: true})
			url, spec := testmain.Started(t, s, err).URL, locks.Spec{Lock: lock, Addrs: []string{s.URL}}
			switch {
			case lock == locks.S3:
				url = onaws.On(onaws.S3, "locks", url)
			case strings.Contains(url, "?"):
				url += "&pool_max_conns=2" // the lock's URL may have that
			default:
				url += "?pool_max_conns=2"
			}
			if lock == locks.Postgres && s.Provider != testbed.External { // which may have the table
				says(t, "create it with dlock/pglock/schema.sql", "set", "-counter", "-force", url, "a/b", "10")
			}
			b, err := locks.Open(t.Context(), spec)
			require.NoError(t, err)
			defer func() { require.NoError(t, b.Close()) }()
			take := func(key, owner string, token uint64) dlock.Grant {
				t.Helper()
				g, err := b.TryAcquire(t.Context(), dlock.Request{Key: key, Owner: owner, TTL: time.Hour})
				require.NoError(t, err)
				require.Equal(t, token, g.Fence)
				return g
			}
			says(t, "there is none in the "+map[string]string{locks.Postgres: "table fencelab_lock", locks.S3: "object locks/lock/a!2Fb"}[lock]+": ", "show", "-counter", url, "a/b")
			g := take("a/b", "x", 1)
			says(t, `the last token of the lock "a/b" is 1`, "show", "-counter", url, "a/b")
			says(t, "was 1 and is 11", "set", "-counter", url, "a/b", "10")
			take("a/b", "x", 11) // not 10, which the store may have seen
			_, err = b.TryAcquire(t.Context(), dlock.Request{Key: "a/b", Owner: "y", TTL: time.Hour})
			require.ErrorIs(t, err, dlock.ErrHeld, "its holder keeps it")
			require.NoError(t, b.Renew(t.Context(), g))
			require.NoError(t, b.Release(t.Context(), g))
			require.NoError(t, b.Release(t.Context(), take("a/b", "y", 12)))
			says(t, "it is 12, and 7 would lower it", "set", "-counter", url, "a/b", "7")
			says(t, "was 12 and is 7", "set", "-counter", "-force", url, "a/b", "7")
			take("a/b", "z", 8)
			says(t, "add -force to create it", "set", "-counter", url, "another", "5")
			says(t, "was 0 and is 5", "set", "-counter", "-force", url, "another", "5")
			take("another", "z", 6)

			// The counter is raised between the command's read and its write.
			f, err := openFence(t.Context(), url, "", true)
			require.NoError(t, err)
			require.NoError(t, f.set(t.Context(), "another", 4, false))
			require.NoError(t, f.set(t.Context(), "another", 6, false)) // which is not raised for its holder
			says(t, "is 6", "show", "-counter", url, "another")

			if o, ok := f.(object); ok { // a new version of the object would restart its lease
				_, err := b.TryAcquire(t.Context(), dlock.Request{Key: "dead", Owner: "x", TTL: time.Nanosecond})
				require.NoError(t, err)
				require.Eventually(t, func() bool {
					h, _, err := o.get(t.Context(), "dead")
					return err == nil && !h.Held
				}, time.Minute, 100*time.Millisecond)
				says(t, "was 1 and is 10", "set", "-counter", url, "dead", "10")
				take("dead", "y", 11)
			} else { // the last owner gets the counter again, although its lease is over
				_, err := b.TryAcquire(t.Context(), dlock.Request{Key: "dead", Owner: "x", TTL: time.Microsecond})
				require.NoError(t, err)
				says(t, "was 1 and is 11", "set", "-counter", url, "dead", "10")
				take("dead", "x", 11)
			}
			require.NoError(t, f.Close())
		})
	}
}

// The error about a poisoned token says the command that helps. Redis and files are in testdata/fence.txtar.
func TestPoisonedStores(t *testing.T) {
	for name, start := range map[string]func(context.Context, *testbed.Options) (*testbed.Server, error){
		stores.Postgres: testbed.StartPostgres, stores.S3: testbed.StartS3, stores.DynamoDB: testbed.StartDynamoDB,
	} {
		t.Run(name, func(t *testing.T) {
			url := testmain.Serve(t, start, &testbed.Options{AllowEmbedded: true}).URL
			if name != stores.Postgres {
				url = onaws.On(name, "poisoned", url)
			}
			s, err := stores.Open(t.Context(), url, stores.Options{})
			require.NoError(t, err)
			defer func() { require.NoError(t, s.Close()) }()
			write := func(token uint64) error {
				return s.Write(t.Context(), "acme", resource.Fence{Token: token, Seq: 1}, []byte("v"))
			}
			require.NoError(t, write(math.MaxUint64))
			args := []string{"fence", "set", "-force", "STORE-URL", "acme", "7"}
			require.ErrorContains(t, write(7), ": fencelab "+strings.ReplaceAll(strings.Join(args, " "), "acme", "'acme'"))
			args[3] = url
			says(t, "was 18446744073709551615 and is 7.0", args[1:]...)
			require.NoError(t, write(7))
			says(t, "the fence of \"acme\" is 7\n", "show", url, "acme")
			says(t, "it is 7, and 6 would lower it", "set", url, "acme", "6")
		})
	}
}

// fence-floor is on another node than most counters, where a lock doesn't read it.
func TestFenceInACluster(t *testing.T) {
	for _, redirect := range []string{"MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1"} {
		m := miniredis.RunT(t)
		var elsewhere string
		m.Server().SetPreHook(func(c *server.Peer, _ string, args ...string) bool {
			switch slices.Index(args, elsewhere) {
			case -1:
				return false
			case 0:
				c.WriteError(redirect)
			default: // a script's key that is not the first
				c.WriteError("CROSSSLOT Keys in request don't hash to the same slot")
			}
			return true
		})
		url := "redis://" + m.Addr()
		says(t, "there is none", "show", "-counter", url, "k")
		elsewhere = "fence-floor"
		says(t, "there is none", "show", "-counter", url, "k")
		says(t, "is 7", "set", "-counter", "-force", url, "k", "7")
		says(t, "the last token of the lock \"k\" is 7\n", "show", "-counter", url, "k")
		elsewhere = "fence:{k}"
		_, code, err := tool(t, "fence", "show", "-counter", url, "k")
		require.ErrorContains(t, err, redirect)
		require.Equal(t, 1, code)
	}
}

// The counter is reaped between the command's read, which returned 10, and its write.
func TestReapedMeanwhile(t *testing.T) {
	m := miniredis.RunT(t)
	require.NoError(t, m.Set("fence-floor", "20"))
	client, err := redisclient.New("redis://" + m.Addr())
	require.NoError(t, err)
	c := counter{client}
	defer func() { require.NoError(t, c.Close()) }()
	require.NoError(t, c.set(t.Context(), "k", 15, false))
	require.False(t, m.Exists("fence:{k}"), "its next token must be 21")
	require.NoError(t, c.set(t.Context(), "k", 25, false))
	m.CheckGet(t, "fence:{k}", "25")
}

// A lock is granted twice between the command's read and its write, which doesn't lower the counter.
func TestForceRaisesOnly(t *testing.T) {
	for _, counter := range []string{"fence:{k}", "fence-floor"} { // from which a missing one starts
		m := miniredis.RunT(t)
		require.NoError(t, m.Set(counter, "10"))
		m.Server().SetPreHook(func(_ *server.Peer, command string, _ ...string) bool {
			if strings.HasPrefix(strings.ToUpper(command), "EVAL") {
				_ = m.Set("fence:{k}", "12")
			}
			return false
		})
		says(t, "was 10 and is 12", "set", "-counter", "-force", "redis://"+m.Addr(), "k", "10")
		m.CheckGet(t, "fence:{k}", "12")
	}
}
