package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onaws"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// renewing renews a lease a few times, then returns an error or, without one, is silent.
type renewing struct {
	dlock.Backend
	left int
	err  error
}

func (r *renewing) Renew(ctx context.Context, g dlock.Grant) error {
	if r.left--; r.left >= 0 {
		return r.Backend.Renew(ctx, g)
	}
	if r.err == nil {
		<-ctx.Done()
		return ctx.Err()
	}
	return r.err
}

// supervise gives up a command that survives SIGKILL, such as one with other privileges.
func TestSuperviseGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := dlock.New(memlock.New(), &dlock.Options{TTL: 30 * time.Second})
		require.NoError(t, err)
		h, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		kills := 0
		err = supervise(h, nil, func(s syscall.Signal) {
			if s == syscall.SIGKILL {
				kills++
			}
		}, nil, time.Hour)
		require.ErrorIs(t, err, dlock.ErrLost)
		require.ErrorIs(t, err, errStillRuns, "so the lock isn't released")
		require.Equal(t, maxKills, kills)
		require.ErrorIs(t, h.Release(t.Context()), dlock.ErrLost)
		require.NoError(t, l.Close())
	})
}

// A command that ignores SIGTERM gets it when two renewals have failed, and SIGKILL before the lease ends, or at once if the
// lease is taken away.
func TestSupervise(t *testing.T) {
	silent := errors.New("no answer")
	for want, c := range map[string]struct {
		renewed int
		err     error
		maxHold time.Duration
		says    string
	}{
		"[24.698s terminated 28.698s killed]": {0, silent, time.Hour, "dlock: lease lost: it was not renewed"},
		"[34.698s terminated 38.698s killed]": {1, silent, time.Hour, "dlock: lease lost: it was not renewed"},
		"[44.698s terminated 48.698s killed]": {9, silent, 30 * time.Second, "dlock: lease lost: the lock was held for 30s (-max-hold)"},
		"[20s killed]":                        {1, dlock.ErrLost, time.Hour, "dlock: lease lost"},
	} {
		synctest.Test(t, func(t *testing.T) {
			o := &dlock.Options{TTL: 30 * time.Second, Renew: dlock.Renew{Every: 10 * time.Second, MaxHold: c.maxHold}}
			l, err := dlock.New(&renewing{memlock.New(), c.renewed, c.err}, o)
			require.NoError(t, err)
			began := time.Now()
			h, err := l.Acquire(t.Context(), "k")
			require.NoError(t, err)
			var sent []string
			exited := make(chan struct{})
			err = supervise(h, exited, func(s syscall.Signal) {
				require.Equal(t, errors.Is(c.err, dlock.ErrLost), h.Context().Err() != nil, "the lease goes on")
				sent = append(sent, fmt.Sprint(time.Since(began), s))
				if s == syscall.SIGKILL {
					close(exited)
				}
			}, nil, c.maxHold)
			require.ErrorIs(t, err, dlock.ErrLost)
			require.ErrorContains(t, err, c.says)
			require.Equal(t, want, fmt.Sprint(sent))
			_ = h.Release(t.Context())
			require.NoError(t, l.Close())
		})
	}
}

// handed is a lock service that hands a lease over for a third of its TTL.
type handed struct{ *renewing }

func (h handed) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, err := h.renewing.Acquire(ctx, r)
	g.Provisional = r.TTL / 3
	return g, err
}

// A command runs though the first renewal fails, unless its lease is short or lost. In virtual time.
func TestConfirm(t *testing.T) {
	refused := errors.New("overloaded")
	for _, c := range []struct {
		backend dlock.Backend
		took    time.Duration
		want    error
	}{
		{&renewing{memlock.New(), 0, refused}, 0, nil},
		{&renewing{memlock.New(), 0, nil}, 30 * time.Second / 4, nil},
		{&renewing{memlock.New(), 0, dlock.ErrLost}, 0, dlock.ErrLost},
		{handed{&renewing{memlock.New(), 1, refused}}, 0, nil},
		{handed{&renewing{memlock.New(), 0, refused}}, 0, refused},
	} {
		synctest.Test(t, func(t *testing.T) {
			l, err := dlock.New(c.backend, &dlock.Options{TTL: 30 * time.Second})
			require.NoError(t, err)
			h, err := l.Acquire(t.Context(), "k")
			require.NoError(t, err)
			began := time.Now()
			require.ErrorIs(t, confirm(t.Context(), h), c.want)
			require.Equal(t, c.took, time.Since(began))
			_ = h.Release(t.Context())
			require.NoError(t, l.Close())
		})
	}
}

// A lease that ends while the guard starts was not lost by a command: there was none.
func TestOverBeforeTheCommand(t *testing.T) {
	o := &dlock.Options{TTL: 2 * time.Millisecond, Renew: dlock.Renew{Every: time.Millisecond, MaxHold: 1}}
	l, err := dlock.New(memlock.New(), o)
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	for began := time.Now(); ; {
		require.Less(t, time.Since(began), patience)
		h, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		err = runUnder(t.Context(), h, exec.CommandContext(t.Context(), "true"), time.Hour, func() error { return nil })
		_ = h.Release(t.Context())
		if err != nil && strings.Contains(err.Error(), "not started") {
			require.ErrorIs(t, err, dlock.ErrLost)
			_, coded := errors.AsType[*cli.ExitError](err)
			require.False(t, coded, "it is 125, as after any other failure")
			return
		}
	}
}

// A signal that comes while the guard starts is fencelab's: the command doesn't run. The guard is found without PATH.
func TestEndedBeforeTheCommand(t *testing.T) {
	l, err := dlock.New(memlock.New(), nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	h, err := l.Acquire(t.Context(), "k")
	require.NoError(t, err)
	ran := filepath.Join(t.TempDir(), "ran")
	cmd, why := exec.CommandContext(t.Context(), "touch", ran), errors.New("a signal")
	t.Setenv("PATH", "")
	require.ErrorIs(t, runUnder(t.Context(), h, cmd, time.Hour, func() error { return why }), why)
	require.NoFileExists(t, ran)
	require.NoError(t, h.Release(t.Context()))
}

// The guard finds both in its pipe.
func TestSignalRightAfterTheStart(t *testing.T) {
	g, err := startGuard(t.Context(), t.Context(), exec.CommandContext(t.Context(), "sleep", "60"), os.Environ())
	require.NoError(t, err)
	defer g.Close()
	_, err = g.orders.Write([]byte{byte(startCommand), byte(syscall.SIGTERM)})
	require.NoError(t, err)
	<-g.exited
	code, left := g.result()
	require.NoError(t, left)
	require.Equal(t, exitSignal+int(syscall.SIGTERM), code)
}

// unanswered is a lock service that gets requests and is silent.
type unanswered struct{ dlock.Backend }

func (unanswered) TryAcquire(ctx context.Context, _ dlock.Request) (dlock.Grant, error) {
	<-ctx.Done()
	return dlock.Grant{}, context.Cause(ctx)
}

func (u unanswered) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return u.TryAcquire(ctx, r)
}

// In virtual time.
func TestAcquireEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l, err := dlock.New(unanswered{memlock.New()}, nil)
		require.NoError(t, err)
		signalled := errors.New("a signal")
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Minute, signalled)
		defer cancel()
		began := time.Now()
		_, err = locks.Acquire(ctx, l, "k", 7*time.Second)
		require.ErrorContains(t, err, "within 7s (-wait)")
		require.Equal(t, 7*time.Second, time.Since(began))
		_, err = l.TryAcquire(ctx, "k")
		require.ErrorIs(t, err, signalled)
		require.Equal(t, time.Minute, time.Since(began))
		require.NoError(t, l.Close())
	})
}

// A signal ends a start that would take for ever; a later one is the command's.
func TestUntilSignal(t *testing.T) {
	signals := make(chan os.Signal, 1)
	ctx, begin := untilSignal(t.Context(), signals)
	signals <- syscall.SIGHUP
	<-ctx.Done()
	coded, ok := errors.AsType[*cli.ExitError](begin())
	require.True(t, ok)
	require.Equal(t, exitSignal+int(syscall.SIGHUP), coded.Code)

	for range 100 {
		_, begin = untilSignal(t.Context(), signals)
		signals <- syscall.SIGTERM
		require.Error(t, begin())
		require.Empty(t, signals)
	}

	ctx, begin = untilSignal(t.Context(), signals)
	require.NoError(t, begin())
	signals <- syscall.SIGTERM
	require.NoError(t, begin())
	require.NoError(t, ctx.Err())
	require.Len(t, signals, 1)
}

// Opening an S3 lock takes some twenty requests, and may exceed other servers' timeout.
func TestSlowS3(t *testing.T) {
	t.Parallel()
	server := testmain.Serve(t, testbed.StartS3, nil)
	link, err := faults.NewLink(server.Addr)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, link.Close()) })
	address := onaws.On(onaws.S3, "nightly", strings.Replace(server.URL, server.Addr, link.Addr(), 1))
	u, err := url.Parse(address)
	require.NoError(t, err)
	config, err := onaws.Config(t.Context(), u, http.DefaultClient)
	require.NoError(t, err)
	require.NoError(t, onaws.OpenBucket(u, config).Create(t.Context()))
	_, err = link.DelayReplies(t.Context(), 300*time.Millisecond)
	require.NoError(t, err)
	out, err := exec.CommandContext(t.Context(), "fencelab", "exec", "-lock", address, "-key", "k", "--", "echo", "ran").CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, "ran\n", string(out))
}
