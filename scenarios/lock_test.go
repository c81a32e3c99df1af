package scenarios_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios"
)

// stubborn is a lock whose leases end only by Release. The first isn't renewed.
type stubborn struct {
	scenarios.Lock
	grants, held int
}

func (s *stubborn) TryAcquire(context.Context, string) (scenarios.Lease, error) {
	if s.held > 0 {
		return nil, dlock.ErrHeld
	}
	s.grants++
	s.held++
	return &stubbornLease{s: s, renewed: s.grants > 1}, nil
}

type stubbornLease struct {
	scenarios.Lease
	s       *stubborn
	renewed bool
}

func (*stubbornLease) Fence() uint64            { return 1 }
func (*stubbornLease) Context() context.Context { return context.Background() }

func (l *stubbornLease) Until() time.Time {
	if l.renewed {
		return time.Now()
	}
	return time.Unix(1, 0)
}

func (l *stubbornLease) Release(context.Context) error {
	l.s.held--
	return nil
}

// A lease that isn't renewed is released before another is acquired.
func TestLeaseNotRenewed(t *testing.T) {
	s := &stubborn{}
	_, err := scenarios.Checked(s).TryAcquire(t.Context(), "k")
	require.NoError(t, err)
	require.Equal(t, 2, s.grants)
}
