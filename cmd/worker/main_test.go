package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
)

func TestMain(m *testing.M) { testmain.Run(m) }

type bench struct {
	redis *miniredis.Miniredis
	store *resource.Memory
	args  []string
}

func newBench(t *testing.T, o resource.HandlerOptions) *bench {
	t.Helper()
	b := &bench{redis: miniredis.RunT(t), store: resource.NewMemory()}
	b.args = []string{"-lock", "redis://" + b.redis.Addr(), "-resource", testmain.Resource(t, b.store, &o), "-log-level", "error"}
	return b
}

func (b *bench) work(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := run(t.Context(), append(b.args, args...), &out)
	return out.String(), err
}

func (b *bench) ledger(t *testing.T, key string) string {
	t.Helper()
	rec, err := b.store.Read(t.Context(), key)
	require.NoError(t, err)
	return string(rec.Value)
}

func TestJob(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	out, err := b.work(t, "-name", "A")
	require.NoError(t, err)
	require.Contains(t, out, "A acquired token 1, lease 10s until ")
	require.Contains(t, out, "A wrote\n")
	require.Contains(t, out, "A released\n")
	_, err = b.work(t, "-name", "B", "-n", "2", "-check", "on", "-renew", "1s")
	require.NoError(t, err)
	require.Equal(t, "A\nB.1\nB.2\n", b.ledger(t, "demo"))
	require.False(t, b.redis.Exists("lock:{demo}"), "the lock is free again")
}

func TestReleaseFails(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	err := run(t.Context(), b.args, onLine(func(line string) {
		if strings.HasSuffix(line, "wrote\n") {
			b.redis.SetError("ERR the disk is on fire")
		}
	}))
	require.ErrorContains(t, err, "worker: release: ")
	require.ErrorContains(t, err, "the disk is on fire")
}

func TestFlagsFromTheEnvironment(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{Token: "secret"})
	t.Setenv("FENCELAB_KEY", "billing/acme")
	t.Setenv("FENCELAB_TOKEN", "secret")
	_, err := b.work(t, "-name", "A")
	require.NoError(t, err)
	require.Equal(t, "A\n", b.ledger(t, "billing/acme"))
}

func TestStaleWriteIsRefused(t *testing.T) {
	for fence, late := range map[string]string{"on": "A read-stale", "writes": "A write-stale"} {
		t.Run(fence, func(t *testing.T) {
			b := newBench(t, resource.HandlerOptions{})
			require.NoError(t, b.store.Write(t.Context(), "demo", resource.Fence{Token: 7, Seq: 2}, []byte("B\n")))
			out, err := b.work(t, "-name", "A", "-fence", fence)
			var stale *resource.StaleTokenError
			require.ErrorAs(t, err, &stale)
			require.ErrorContains(t, err, "raise the lock's counter: fencelab fence set -counter LOCK-URL 'demo' 7)")
			require.Contains(t, out, late)
			require.Contains(t, out, "A released", "a refused worker gives the lock back")
			require.Equal(t, "B\n", b.ledger(t, "demo"))

			_, err = b.work(t, "-name", "A", "-fence", fence, "-n", "2")
			require.ErrorAs(t, err, &stale, "a series of which nothing was written")
			require.EqualValues(t, 3, stale.Got.Token)
			_, err = b.work(t, "-name", "A", "-fence", fence, "-n", "5")
			require.NoError(t, err, "refusals don't end a series")
			require.Equal(t, "B\nA.5\n", b.ledger(t, "demo"))
		})
	}
}

// No lock reaches this token.
func TestRecovery(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	b.args = append(b.args, "-name", "A", "-key", "acme's")
	require.NoError(t, b.store.Write(t.Context(), "acme's", resource.Fence{Token: 1<<53 - 1, Seq: 1}, nil))
	_, err := b.work(t)
	require.ErrorContains(t, err, `fencelab fence set -force STORE-URL 'acme'\''s' 1, or for cmd/resource, with the server stopped: resource -file FILE -set-fence KEY=1)`)
	require.NoError(t, b.store.Write(t.Context(), "poisoned", resource.Fence{Token: 1 << 53, Seq: 1}, nil))
	_, err = b.work(t, "-key", "poisoned")
	require.ErrorContains(t, err, `-set-fence 'poisoned=1' (that is fencing at work if another worker has written; if not, earlier tokens came from another lock service, or this one has lost its own)`)
	require.NoError(t, b.store.Write(t.Context(), "twice", resource.Fence{Token: 1, Seq: 9}, nil))
	_, err = b.work(t, "-key", "twice")
	require.ErrorContains(t, err, "take another -key")
}

func TestLeaseIsChecked(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	b.redis.ClockTTL(true) // else a late grant on a busy machine would stay for ever
	args := []string{"-name", "A", "-ttl", "300ms", "-pause", "400ms"}
	out, err := b.work(t, append(args, "-check", "on")...)
	require.ErrorContains(t, err, "the lease was lost before the write (-check): set a longer -ttl")
	require.Contains(t, out, "A lost-lease\n")
	require.Contains(t, out, "A release", "whoever has it now")
	require.Empty(t, b.ledger(t, "demo"))
	_, err = b.work(t, args...)
	require.NoError(t, err, "nobody checks, and nobody else has written")
	require.Equal(t, "A\n", b.ledger(t, "demo"))
}

func TestUnfenced(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{Unfenced: true})
	_, err := b.work(t, "-name", "A", "-fence", "off")
	require.NoError(t, err)
	require.Equal(t, "A\n", b.ledger(t, "demo"))

	fenced := newBench(t, resource.HandlerOptions{})
	_, err = fenced.work(t, "-name", "A", "-fence", "off")
	require.ErrorContains(t, err, "X-Fence-Token")
}

// The resource is the Redis that has the lock.
func TestStore(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	b.args = append(b.args, "-resource", "redis://"+b.redis.Addr())
	held := func() string { return b.redis.HGet("resource:{demo}", "value") }
	_, err := b.work(t, "-name", "A")
	require.NoError(t, err)
	_, err = b.work(t, "-name", "B", "-fence", "writes")
	require.NoError(t, err)
	require.Equal(t, "A\nB\n", held())
	require.Equal(t, "2", b.redis.HGet("resource:{demo}", "token"))

	b.redis.HSet("resource:{demo}", "token", "9")
	out, err := b.work(t, "-name", "C")
	require.ErrorContains(t, err, "stale fencing token")
	require.Contains(t, out, "C read-stale")
	_, err = b.work(t, "-name", "C", "-fence", "off")
	require.NoError(t, err, "a client that knows nothing of fencing")
	require.Equal(t, "A\nB\nC\n", held())
}

// Errors must not show passwords.
func TestNobodyThere(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	for addr, want := range map[string]string{
		"postgres://u:hunter2@127.0.0.1:1/db":                   "worker: -resource: ",
		"redis://:hunter2@127.0.0.1:1":                          "worker: -resource: ",
		"s3://id:hunter2@bucket?endpoint=http://127.0.0.1:1":    "worker: -resource: ",
		"dynamodb://id:hunter2@tab?endpoint=http://127.0.0.1:1": "worker: -resource: ",
		"memcached://u:hunter2@127.0.0.1:1":                     `worker: -resource: stores: unknown URL scheme "memcached"; use one of http://HOST:PORT`,
		"http://u:hunter2@host:port":                            "worker: -resource: stores: the address is not a URL",
		"mongo":                                                 `unknown URL scheme ""`,
	} {
		_, err := b.work(t, "-resource", addr)
		require.ErrorContains(t, err, want, addr)
		require.NotContains(t, err.Error(), "hunter2")
	}
	_, err := b.work(t, "-lock", "redis://:hunter2@127.0.0.1:1/0")
	require.ErrorContains(t, err, "redis at 127.0.0.1:1/0 (-lock)")
	require.NotContains(t, err.Error(), "hunter2")
}

func TestFlagsFirst(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	for want, args := range map[string][]string{
		`stores: unknown URL scheme "memcached"`:   {"-resource", "memcached://127.0.0.1:1"},
		"too long for a TTL":                       {"-ttl", "1s", "-renew", "2s"},
		"choose another with -metrics":             {"-metrics", b.redis.Addr()},
		"worker: can't listen on -metrics nowhere": {"-metrics", "nowhere"},
	} {
		for _, lock := range []string{"redis://127.0.0.1:1", "postgres://no address"} {
			err := run(t.Context(), append(append(b.args, "-lock", lock), args...), io.Discard)
			require.ErrorContains(t, err, want, "%q", args)
		}
	}
}

func TestLockNotToBeHad(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	require.NoError(t, b.redis.Set("lock:{demo}", "somebody"))
	_, err := b.work(t, "-wait", "20ms")
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "the lock was not free within 20ms (-wait)")
	owner, err := b.redis.Get("lock:{demo}")
	require.NoError(t, err)
	require.Equal(t, "somebody", owner)
}

// A worker ends between read and write, when nothing is written and the lock is released, or between two jobs.
func TestInterrupted(t *testing.T) {
	for _, c := range []struct{ n, said, want, ledger string }{
		{"0", "read []\n", "", ""},
		{"1", "read []\n", "interrupted", ""},
		{"0", "released\n", "", "A.1\n"},
		{"1", "released\n", "", "A\n"},
		{"2", "released\n", "interrupted", "A.1\n"},
	} {
		b, pause := newBench(t, resource.HandlerOptions{}), "0"
		if c.ledger == "" {
			pause = "1h"
		}
		err := b.interrupted(t, c.said, 1, "-n", c.n, "-pause", pause)
		if c.want == "" {
			require.NoError(t, err, "%q", c)
		} else {
			require.ErrorContains(t, err, c.want, "%q", c)
		}
		require.False(t, b.redis.Exists("lock:{demo}"))
		require.Equal(t, c.ledger, b.ledger(t, "demo"))
	}
}

// The pauses between refused jobs grow up to a limit, and restart once a job has written.
func TestRefusedOnAndOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := dlock.New(memlock.New(), nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, l.Close()) }()
		store := resource.NewMemory()
		overtake := func(token uint64) {
			require.NoError(t, store.Write(t.Context(), "k", resource.Fence{Token: token, Seq: 1}, nil))
		}
		overtake(9)
		ctx, interrupt := context.WithCancel(t.Context())
		defer interrupt()
		var pauses []time.Duration
		last, wrote := time.Now(), 0
		w := worker{name: "A", key: "k", fence: "on", stdout: onLine(func(line string) {
			switch {
			case strings.Contains(line, " acquired "):
				pauses, last = append(pauses, time.Since(last)), time.Now()
			case strings.HasSuffix(line, "wrote\n"):
				switch wrote++; wrote {
				case 2:
					overtake(12)
				case 3:
					interrupt()
				}
			}
		})}
		require.NoError(t, w.jobs(ctx, l, &stores.Store{Store: store}))
		const ms = time.Millisecond
		require.Equal(t, []time.Duration{
			0, 100 * ms, 200 * ms, 400 * ms, 800 * ms, 1600 * ms, 3200 * ms, 5000 * ms, // 1 to 8 are refused, and 9 writes
			5000 * ms, 0, 0, 100 * ms, // 10 writes, 11 is refused, and 12 writes
		}, pauses)
	})
}

// twice repeats each write, as a proxy may.
type twice struct{ resource.Store }

func (s twice) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return errors.Join(s.Store.Write(ctx, key, f, value), s.Store.Write(ctx, key, f, value))
}

func TestRepeatedWrite(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	out, err := b.work(t, "-name", "A", "-resource", testmain.Resource(t, twice{b.store}, nil))
	require.NoError(t, err, "the second was refused because the first was accepted")
	require.Contains(t, out, "A wrote\n")
	require.Equal(t, "A\n", b.ledger(t, "demo"))
}

// ZooKeeper's client requests its session's timeout before the lock is known.
func TestSessionOutlivesTheLease(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, append(b.args, "-lock", "zookeeper://"+ln.Addr().String(), "-ttl", "8s"), io.Discard)
	}()
	require.NoError(t, ln.(*net.TCPListener).SetDeadline(time.Now().Add(time.Minute)))
	c, err := ln.Accept()
	require.NoError(t, err)
	require.NoError(t, c.SetDeadline(time.Now().Add(time.Minute)))
	var request struct {
		Length, Version int32
		Zxid            int64
		Timeout         int32
	}
	require.NoError(t, binary.Read(c, binary.BigEndian, &request))
	cancel()
	require.NoError(t, errors.Join(c.Close(), ln.Close()))
	require.Error(t, <-ended)
	require.EqualValues(t, 16_000, request.Timeout, "a lease lasts for half a session at most")
}

// interrupted runs worker A until it has said something a number of times.
func (b *bench) interrupted(t *testing.T, said string, times int, args ...string) error {
	t.Helper()
	ctx, interrupt := context.WithCancelCause(t.Context())
	defer interrupt(nil)
	return run(ctx, append(append(b.args, "-name", "A"), args...), onLine(func(line string) {
		if strings.HasSuffix(line, said) {
			if times--; times == 0 {
				interrupt(errors.New("interrupted"))
			}
		}
	}))
}

type onLine func(line string)

func (o onLine) Write(b []byte) (int, error) {
	o(string(b))
	return len(b), nil
}

func TestMetrics(t *testing.T) {
	b := newBench(t, resource.HandlerOptions{})
	var metrics, health string
	var status int
	var once sync.Once
	var url string
	out := onLine(func(line string) {
		if u, ok := strings.CutPrefix(strings.TrimSpace(line), "metrics on "); ok {
			url = u
		}
		if strings.HasSuffix(line, "read []\n") {
			once.Do(func() {
				_, metrics = testmain.Get(t, url)
				status, health = testmain.Get(t, strings.TrimSuffix(url, "/metrics")+"/healthz")
			})
		}
	})
	require.NoError(t, run(t.Context(), append(b.args, "-metrics", "127.0.0.1:0"), out))
	require.Contains(t, metrics, "dlock_acquire_successes_total 1\n")
	require.Contains(t, metrics, "release_by_non_owner_applied_total 0\n")
	require.Equal(t, 200, status)
	require.Equal(t, "ok\n", health)
}

func TestBadFlags(t *testing.T) {
	for _, flag := range []string{"-n", "-work", "-pause", "-wait"} {
		n := map[bool]string{true: "-1", false: "-1s"}[flag == "-n"]
		require.ErrorContains(t, run(t.Context(), []string{flag, n}, io.Discard), "must not be negative", flag)
	}
	for want, args := range map[string][]string{
		"worker: -lock: want a URL, such as redis://HOST:PORT, or a name: consul, etcd, ": {"-lock", "paper"},
		"at least 1ms":        {"-ttl", "0"},
		"unexpected argument": {"A"},
	} {
		err := run(t.Context(), args, io.Discard)
		require.ErrorContains(t, err, want)
	}
}
