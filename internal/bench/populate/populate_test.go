package populate_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
	"github.com/fencelab/fencelab/internal/bench/populate"
)

// TestSet is a golden test: a second run with a seed must find the locks of the first.
func TestSet(t *testing.T) {
	first := populate.Set{Seed: 1, TTL: time.Hour}.Request(0)
	require.Equal(t, dlock.Request{Key: "gen/783825822a6f9e62", Owner: "da2190e8-28e4-49d2-976e-5977e3a0b362", TTL: time.Hour}, first)
	keys, owners := map[string]bool{}, map[string]bool{}
	for _, seed := range []uint64{1, 2} {
		for i := range uint64(10_000) {
			r := populate.Set{Seed: seed}.Request(i)
			id, err := uuid.Parse(r.Owner)
			require.NoError(t, err)
			require.Equal(t, uuid.Version(4), id.Version(), "as a Locker's")
			keys[r.Key], owners[r.Owner] = true, true
		}
	}
	require.Len(t, keys, 20_000)
	require.Len(t, owners, 20_000)
}

func TestEach(t *testing.T) {
	ctx := t.Context()
	b := memlock.New()
	s := populate.Set{Seed: 7, N: 100, TTL: time.Hour}
	held := s.Request(50)
	held.Owner = "another"
	_, err := b.TryAcquire(ctx, held)
	require.NoError(t, err)
	var counts populate.Counts
	require.NoError(t, populate.Each(ctx, s, 8, &counts, populate.Take(b)))
	require.EqualValues(t, 99, counts.Granted.Load())
	require.EqualValues(t, 1, counts.Held.Load())
	require.EqualValues(t, 100, counts.Done())
	require.NoError(t, b.Close())
	err = populate.Each(ctx, s, 1, &counts, populate.Take(b))
	require.ErrorIs(t, err, dlock.ErrClosed)
	require.ErrorContains(t, err, "lock 1 of 100")
	require.ErrorContains(t, populate.Each(ctx, s, 0, &counts, populate.Take(b)), "there must be one at least")
	cause := errors.New("enough")
	ended, cancel := context.WithCancelCause(ctx)
	cancel(cause)
	require.ErrorIs(t, populate.Each(ended, s, 8, &counts, populate.Take(b)), cause)
}
