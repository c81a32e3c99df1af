package pglock_test

import (
	"os"
	"regexp"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

// TestRaiseCounter runs the statement in docs/operations.md for regressed tokens.
func TestRaiseCounter(t *testing.T) {
	page, err := os.ReadFile("../../docs/operations.md")
	require.NoError(t, err)
	statement := regexp.MustCompile("`(UPDATE fencelab_lock [^`]*)`").FindSubmatch(page)
	require.NotNil(t, statement)
	b, pool := newBackend(t)
	request := func() dlock.Request {
		return dlock.Request{Key: "billing/acme", Owner: uuid.NewString(), TTL: dlock.DefaultTTL}
	}
	g := locktest.Take(t, b, request())
	require.NoError(t, b.Release(t.Context(), g))
	_, err = pool.Exec(t.Context(), string(statement[1]))
	require.NoError(t, err)
	again := locktest.Take(t, b, request())
	require.NoError(t, b.Release(t.Context(), again))
	require.Equal(t, g.Fence+4+1, again.Fence)
}
