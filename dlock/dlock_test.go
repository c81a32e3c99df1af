package dlock_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
)

func TestCheckKey(t *testing.T) {
	for _, key := range []string{"a", "a b", "{}", "\u65e5\u672c", "\U0001f512", strings.Repeat("k", dlock.MaxKeyLen)} {
		require.NoError(t, dlock.CheckKey(key), "key %q", key)
	}
	for _, key := range []string{"", strings.Repeat("k", dlock.MaxKeyLen+1), "a\xff", "a\nb", "\x00", "\x7f", "\u0085"} {
		require.ErrorIs(t, dlock.CheckKey(key), dlock.ErrInvalid, "key %q", key)
	}
}

func TestNewRefuses(t *testing.T) {
	type o = dlock.Options
	tests := map[string]struct {
		b dlock.Backend
		o o
	}{
		"no backend":           {nil, o{TTL: time.Second}},
		"no TTL":               {memlock.New(), o{}},
		"negative TTL":         {memlock.New(), o{TTL: -1}},
		"TTL too short":        {memlock.New(), o{TTL: time.Millisecond - 1}},
		"negative Every":       {memlock.New(), o{TTL: time.Second, Renew: dlock.Renew{Every: -1, MaxHold: 1}}},
		"negative MaxHold":     {memlock.New(), o{TTL: time.Second, Renew: dlock.Renew{MaxHold: -1}}},
		"Every as long as TTL": {memlock.New(), o{TTL: time.Second, Renew: dlock.Renew{Every: time.Second, MaxHold: time.Minute}}},
		"Every in the margin":  {memlock.New(), o{TTL: time.Second, Renew: dlock.Renew{Every: 988 * time.Millisecond, MaxHold: time.Minute}}},
		"Every, no MaxHold":    {memlock.New(), o{TTL: time.Second, Renew: dlock.Renew{Every: time.Second / 3}}},
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) {
			l, err := dlock.New(test.b, &test.o)
			require.ErrorIs(t, err, dlock.ErrInvalid)
			require.Nil(t, l)
		})
	}
}

func TestNewDefaults(t *testing.T) {
	l := newLocker(t, memlock.New(), nil)
	h := acquire(t, l, t.Context(), "k")
	require.Equal(t, dlock.DefaultTTL, h.TTL())
	require.Equal(t, "k", h.Key())
	require.Len(t, h.Owner(), 36)
	require.EqualValues(t, 1, h.Fence())
	require.NoError(t, h.Release(t.Context()))
}

func TestBadKeySendsNothing(t *testing.T) {
	reg := prometheus.NewRegistry()
	l := newLocker(t, memlock.New(), &dlock.Options{TTL: time.Second, Registerer: reg})
	_, err := l.Acquire(t.Context(), "")
	require.ErrorIs(t, err, dlock.ErrInvalid)
	_, err = l.TryAcquire(t.Context(), "a\n")
	require.ErrorIs(t, err, dlock.ErrInvalid)
	require.Zero(t, value(t, reg, "dlock_acquire_attempts_total"))
}

func TestMetrics(t *testing.T) {
	bubble(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		m := memlock.New()
		o := &dlock.Options{TTL: time.Second, Registerer: reg}
		a, b := newLocker(t, m, o), newLocker(t, m.Client(), o) // two on one Registerer share its collectors
		h := acquire(t, a, t.Context(), "k")
		for range 2 { // no timeouts
			_, err := b.TryAcquire(t.Context(), "k")
			require.ErrorIs(t, err, dlock.ErrHeld)
		}
		_, err := b.Acquire(ended(t), "k")
		require.Error(t, err)
		require.NoError(t, h.Renew(t.Context()))
		time.AfterFunc(time.Second/4, func() { _ = h.Release(context.Background()) })
		h = acquire(t, b, t.Context(), "k")
		<-h.Context().Done()
		time.Sleep(time.Second)
		require.ErrorIs(t, h.Release(t.Context()), dlock.ErrLost)

		for name, want := range map[string]float64{
			"dlock_acquire_attempts_total":       5,
			"dlock_acquire_successes_total":      2,
			"dlock_acquire_timeouts_total":       1,
			"dlock_acquire_duration_seconds":     2,
			"dlock_acquire_duration_seconds_sum": 0.25,
			"dlock_held_seconds":                 2,
			"dlock_held_seconds_sum":             0.25 + limit(time.Second).Seconds(),
			"dlock_renewals_total":               1,
			"dlock_leases_lost_total":            1,
			"release_by_non_owner_total":         1,
			"release_by_non_owner_applied_total": 0,
		} {
			require.InDelta(t, want, value(t, reg, name), 1e-9, name)
		}
	})
}

func TestLossIsReported(t *testing.T) {
	for _, told := range []bool{true, false} {
		faked(t, func(t *testing.T, f *fake) {
			f.renew = func(context.Context, dlock.Grant, grantFunc) error {
				return fmt.Errorf("%w: its node is gone", dlock.ErrLost)
			}
			var log bytes.Buffer
			o := &dlock.Options{TTL: time.Second, Logger: slog.New(slog.NewTextHandler(&log, nil))}
			if told {
				o.Renew = dlock.Renew{Every: 100 * time.Millisecond, MaxHold: time.Hour}
			}
			h, reg := holdWith(t, f, o)
			<-h.Context().Done()
			synctest.Wait()
			require.EqualValues(t, 1, value(t, reg, "dlock_leases_lost_total"))
			require.Equal(t, 1, strings.Count(log.String(), `msg="dlock: lease lost"`), log.String())
			require.Equal(t, 1, strings.Count(log.String(), "\n"), "not as a failed renewal, too: %s", log.String())
			require.Equal(t, told, strings.Contains(log.String(), " err="), log.String())
			require.Equal(t, told, strings.Contains(context.Cause(h.Context()).Error(), "its node is gone"))
		})
	}
}

func TestMetricsCannotRegister(t *testing.T) {
	reg := prometheus.NewRegistry()
	reg.MustRegister(prometheus.NewGauge(prometheus.GaugeOpts{Name: "dlock_renewals_total", Help: "another's"}))
	_, err := dlock.New(memlock.New(), &dlock.Options{TTL: time.Second, Registerer: reg})
	require.ErrorContains(t, err, "dlock_renewals_total")
}

func TestMetricsWrapped(t *testing.T) {
	reg := prometheus.NewRegistry()
	for range 2 {
		wrapped := prometheus.WrapRegistererWith(prometheus.Labels{"locker": "a"}, reg)
		l := newLocker(t, memlock.New(), &dlock.Options{TTL: time.Hour, Registerer: wrapped})
		require.NoError(t, acquire(t, l, t.Context(), "k").Release(t.Context()))
	}
	require.EqualValues(t, 2, value(t, reg, "dlock_acquire_successes_total"))
}
