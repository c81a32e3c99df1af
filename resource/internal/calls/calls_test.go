package calls_test

import (
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/calls"
)

func TestClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c calls.Calls
		for range 2 {
			require.NoError(t, c.Begin(t.Context(), "k"))
		}
		closed := false
		go func() {
			c.Close()
			closed = true
		}()
		for range 2 {
			synctest.Wait()
			require.False(t, closed)
			require.ErrorIs(t, c.Begin(t.Context(), "k"), resource.ErrClosed)
			c.End()
		}
		synctest.Wait()
		require.True(t, closed)
		c.Close()
	})
}

func TestBegin(t *testing.T) {
	var c calls.Calls
	ended, end := context.WithCancelCause(t.Context())
	end(io.EOF)
	require.ErrorIs(t, c.Begin(ended, "k"), io.EOF)
	require.ErrorContains(t, c.Begin(t.Context(), ""), "key is empty")
	require.ErrorIs(t, c.Begin(t.Context(), "k", nil, io.EOF), io.EOF)
	c.Close()
}

func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancelCause(t.Context())
		for _, ctx := range []context.Context{context.Background(), ctx} {
			got, err := calls.Await(ctx, func() (int, error) { return 7, io.EOF })
			require.Equal(t, 7, got)
			require.Equal(t, io.EOF, err)
		}
		silent := make(chan struct{})
		go func() {
			synctest.Wait()
			end(io.ErrClosedPipe)
		}()
		got, err := calls.Await(ctx, func() (int, error) { <-silent; return 7, nil })
		require.Zero(t, got)
		require.EqualError(t, err, "io: read/write on closed pipe (the operation may still take effect)")
		require.ErrorIs(t, err, io.ErrClosedPipe)
		close(silent)
	})
}

type bothReady struct{ context.Context }

func (c bothReady) Done() <-chan struct{} {
	synctest.Wait()
	return c.Context.Done()
}

func TestAwaitReplyAndEndAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		end()
		ctx = bothReady{ctx}
		for range 50 { // select chooses at random
			got, err := calls.Await(ctx, func() (int, error) { return 7, io.EOF })
			require.Equal(t, 7, got)
			require.Equal(t, io.EOF, err)
			require.Panics(t, func() { _, _ = calls.Await(ctx, func() (int, error) { panic("f's") }) })
		}
	})
}

func TestAwaitPanics(t *testing.T) {
	defer func() {
		err, ok := recover().(error)
		require.True(t, ok)
		require.ErrorIs(t, err, io.EOF)
		require.Regexp(t, `^EOF\n\ngoroutine (?s:.*)\.TestAwaitPanics\.`, err.Error())
	}()
	_, _ = calls.Await(t.Context(), func() (int, error) { panic(io.EOF) })
}

func TestAwaitPanicsAlone(t *testing.T) {
	const child = "FENCELAB_TEST_PANICS"
	if os.Getenv(child) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), child+"=1")
		out, err := cmd.CombinedOutput()
		require.Error(t, err)
		require.Regexp(t, `(?s)^panic: f's.*\.TestAwaitPanicsAlone\.`, string(out))
		return
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		left := make(chan struct{})
		_, _ = calls.Await(ctx, func() (int, error) { end(); <-left; panic("f's") })
		close(left)
		synctest.Wait()
	})
}

func TestLate(t *testing.T) {
	cause := errors.New("the lease is lost")
	ctx, cancel := context.WithCancelCause(t.Context())
	require.Equal(t, context.Canceled, calls.Late(ctx, context.Canceled), "of another context")
	require.NoError(t, calls.Late(ctx, nil))
	cancel(cause)
	for _, err := range []error{nil, io.EOF, resource.ErrNoRoom} {
		require.Equal(t, err, calls.Late(ctx, err))
	}
	for _, err := range []error{context.Canceled, cause} {
		require.EqualError(t, calls.Late(ctx, err), err.Error()+" (the operation may still take effect)")
		require.ErrorIs(t, calls.Late(ctx, err), err)
	}
}

func TestWrap(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	require.NoError(t, calls.Wrap(ctx, "s", nil))
	for _, err := range []error{&resource.StaleTokenError{Key: "k"}, resource.ErrNotFound} {
		require.Equal(t, err, calls.Wrap(ctx, "s", err))
	}
	require.EqualError(t, calls.Wrap(ctx, "s", io.EOF), "s: EOF")
	cause := errors.New("the lease is lost")
	cancel(cause)
	require.EqualError(t, calls.Wrap(ctx, "s", io.EOF), "s: the lease is lost: EOF")
	require.ErrorIs(t, calls.Wrap(ctx, "s", io.EOF), cause)
	require.EqualError(t, calls.Wrap(ctx, "s", cause), "s: the lease is lost")
}
