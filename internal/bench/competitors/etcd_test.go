package competitors_test

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/competitors"
)

// TestEtcdMutexNobodyThere: an acquisition ends with its context, or with advice after a while.
func TestEtcdMutexNobodyThere(t *testing.T) {
	t.Parallel() // it waits
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	addr := ln.Addr().String()
	require.NoError(t, ln.Close())
	l, err := competitors.Open(t.Context(), competitors.Spec{Lock: competitors.EtcdMutex, Addrs: []string{addr}, TTL: time.Second})
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	acquire := func(ctx context.Context) error {
		done := make(chan error, 1)
		go func() {
			_, err := l.Acquire(ctx, t.Name())
			done <- err
		}()
		select {
		case err := <-done:
			return err
		case <-time.After(time.Minute):
			return errors.New("it still waits")
		}
	}
	over := errors.New("the run is over")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(over)
	require.ErrorIs(t, acquire(ctx), over)
	require.EqualError(t, acquire(t.Context()), "competitors: etcd at "+addr+": no lease within 5s: start it there, or give the address where it runs")
}
