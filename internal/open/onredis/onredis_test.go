package onredis_test

import (
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/scenarios"
)

// The wrong release checks the owner first: it harms only whoever gets the lock between its two requests.
func TestGetThenDel(t *testing.T) {
	server := miniredis.RunT(t)
	var taken func()
	gaps := 0
	b, err := onredis.Backend(t.Context(), scenarios.LockSpec{Lock: onredis.Name, Addrs: []string{server.Addr()}, Gap: func() error {
		gaps++
		taken()
		return nil
	}})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	take := func(owner string) dlock.Grant {
		g, err := b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: owner, TTL: time.Hour})
		require.NoError(t, err)
		return g
	}
	var a dlock.Grant
	for _, c := range []struct {
		between func()
		want    error
	}{
		{func() {}, nil},
		{func() { server.Del("lock:{k}") }, dlock.ErrLost},
		{func() { server.Del("lock:{k}"); take("b") }, dlock.ErrForeignRelease},
	} {
		a, taken = take("a"), c.between
		require.ErrorIs(t, b.Release(t.Context(), a), c.want)
		require.False(t, server.Exists("lock:{k}"))
	}
	require.Equal(t, 3, gaps)
	require.ErrorIs(t, b.Release(t.Context(), a), dlock.ErrLost, "free")
	take("b")
	require.ErrorIs(t, b.Release(t.Context(), a), dlock.ErrLost, "another's")
	require.Equal(t, 3, gaps, "the owner is checked first")
	require.True(t, server.Exists("lock:{k}"))
}
