package resource_test

import (
	"io"
	"math"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/storetest"
)

func at(token, seq uint64) resource.Fence { return resource.Fence{Token: token, Seq: seq} }

func TestLimitJumps(t *testing.T) {
	ctx, under := t.Context(), resource.NewMemory()
	c := newClient(t, serve(t, resource.LimitJumps(under, 10), nil), nil)
	jump := func(key string, token uint64) {
		t.Helper()
		before, _ := under.Read(ctx, key)
		_, err := c.ReadFenced(ctx, key, resource.Fence{Token: token})
		for _, err := range []error{err, c.Write(ctx, key, at(token, 1), []byte("v"))} {
			require.ErrorContains(t, err, "400 Bad Request: the fencing token is too far ahead: ")
			require.ErrorIs(t, err, resource.ErrJump)
		}
		after, _ := under.Read(ctx, key)
		require.Equal(t, before, after)
	}
	for _, token := range []uint64{math.MaxUint64, 11} {
		jump("k", token)
	}
	require.NoError(t, c.Write(ctx, "k", at(10, 1), []byte("v")))
	jump("k", 21)
	_, err := c.ReadFenced(ctx, "k", resource.Fence{Token: 20})
	require.NoError(t, err)
	var stale *resource.StaleTokenError
	require.ErrorAs(t, c.Write(ctx, "k", at(10, 1), []byte("late")), &stale, "which is behind")
	require.NoError(t, c.Write(ctx, "k", at(30, 1), []byte("v")))

	require.ErrorIs(t, resource.LimitJumps(under, 10).Write(ctx, "k", at(41, 1), nil), resource.ErrJump)
	unreadable := resource.LimitJumps(noReads{under}, 10)
	require.ErrorIs(t, unreadable.Write(ctx, "new", at(1, 1), nil), io.EOF, "what it can't check it refuses")
	_, err = unreadable.ReadFenced(ctx, "new", at(1, 0))
	require.ErrorIs(t, err, io.EOF)
	_, err = under.Read(ctx, "new")
	require.ErrorIs(t, err, resource.ErrNotFound)

	storetest.Run(t, storetest.Harness{New: func() (resource.Store, error) {
		return resource.LimitJumps(resource.NewMemory(), math.MaxUint64), nil
	}})
}
