package consullock_test

import (
	"context"
	"regexp"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/consullock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

func TestConformance(t *testing.T) { conform(t, nil) }

// Sessions are hardly longer than leases, so they are often renewed and ended.
func TestConformanceShortSessions(t *testing.T) {
	conform(t, &consullock.Options{MinSessionTTL: 10 * time.Millisecond})
}

func TestConformanceLockDelay(t *testing.T) {
	conform(t, &consullock.Options{LockDelay: 50 * time.Millisecond})
}

func TestConformanceVirtual(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{Virtual: true, NoRepeats: true, New: func(t *testing.T) dlocktest.Service {
		s := newConsul()
		return service(t, func() link { return link{locktest.NewWire(), s, "consul"} }, nil)
	}})
}

// A release's context may end with another lock's loss.
func TestReleaseCutShort(t *testing.T) {
	b := over(t, toServer(t), nil)
	g, err := b.TryAcquire(t.Context(), locktest.Request(time.Hour))
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(dlock.ErrLost)
	require.ErrorIs(t, b.Release(ctx, g), dlock.ErrLost)
	require.NoError(t, b.Renew(t.Context(), g), "it was not released")
	require.NoError(t, b.Release(t.Context(), g))
	require.NoError(t, b.Close())
}

func TestTimerOfARenewedLease(t *testing.T) {
	b := over(t, link{locktest.NewWire(), newConsul(), "consul"}, nil)
	g := locktest.Take(t, b, locktest.Request(time.Hour))
	b.Fire(g)
	require.NoError(t, b.Renew(t.Context(), g))
	require.NoError(t, b.Close())
}

func conform(t *testing.T, o *consullock.Options) {
	t.Helper()
	dlocktest.Run(t, dlocktest.Harness{NoRepeats: true, New: func(t *testing.T) dlocktest.Service {
		return service(t, func() link { return toServer(t) }, o)
	}})
}

func service(t *testing.T, link func() link, o *consullock.Options) dlocktest.Service {
	return dlocktest.Service{
		Backend: func() dlock.Backend { return over(t, link(), o) },
		Faulty: func() (dlock.Backend, dlocktest.Link) {
			l := link()
			faults := l.Link(transactions...)
			faults.Refuse = l.Refuse("lock", "500 no space left on device")
			return over(t, l, o), faults
		},
	}
}

func over(tb testing.TB, l link, o *consullock.Options) *consullock.Backend {
	tb.Helper()
	b, err := consullock.New(clientOver(tb, l), o)
	require.NoError(tb, err)
	return b
}

func TestNewRefuses(t *testing.T) {
	_, err := consullock.New(nil, nil)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	for _, o := range []consullock.Options{
		{Prefix: "/"},
		{Prefix: "a//b"},
		{Prefix: "../"},
		{Prefix: "a b"},
		{Prefix: "a?b"},
		{Prefix: "a%b"},
		{Prefix: "a=b"},
		{Prefix: "a:b"},
		{Prefix: ".b"},
		{MinSessionTTL: -1},
		{MinSessionTTL: time.Microsecond},
		{MinSessionTTL: 25 * time.Hour},
		{LockDelay: -1},
		{LockDelay: time.Minute + 1},
	} {
		client, err := api.NewClient(api.DefaultConfig())
		require.NoError(t, err)
		_, err = consullock.New(client, &o)
		require.ErrorIs(t, err, dlock.ErrInvalid, "%+v", o)
	}
	for _, o := range []consullock.Options{{MinSessionTTL: time.Millisecond}, {MinSessionTTL: 24 * time.Hour}, {LockDelay: time.Minute}} {
		client, err := api.NewClient(api.DefaultConfig())
		require.NoError(t, err)
		b, err := consullock.New(client, &o)
		require.NoError(t, err, "as long and as short as Consul allows: %+v", o)
		require.NoError(t, b.Close())
	}
}

func TestNames(t *testing.T) {
	b := over(t, toServer(t), &consullock.Options{Prefix: "app/locks-"})
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	allowed := regexp.MustCompile(`^[a-zA-Z0-9,_./\-?&=]+$`)
	for key, name := range map[string]string{
		"plain-" + uuid.NewString(): "", "a/b": "a/b", "a//b": "a/=/b", "/": "=/=", "=": "=3D", "%": "=25", "../.": "=2E=2E/=2E",
		"a.b": "a.b", "a..b": "a.=2Eb", "x y?z": "x=20y=3Fz", "A,b_Z:": "A,b_Z=3A", "\u00e9": "=C3=A9", "=/": "=3D/=",
	} {
		if name == "" {
			name = key
		}
		require.Regexp(t, allowed, "app/locks-"+name)
		r := dlock.Request{Key: key, Owner: uuid.NewString(), TTL: time.Hour}
		g := locktest.Take(t, b, r)
		e, _, err := clientOver(t, toServer(t)).KV().Get("app/locks-"+name, nil)
		require.NoError(t, err)
		require.NotNil(t, e, "key %q", key)
		require.Equal(t, r.Owner, string(e.Value))
		require.EqualValues(t, g.Fence, e.ModifyIndex)
		require.NoError(t, b.Release(t.Context(), g))
		e, _, err = clientOver(t, toServer(t)).KV().Get("app/locks-"+name, nil)
		require.NoError(t, err)
		require.Nil(t, e, "a free lock leaves nothing behind, key %q", key)
	}
}
