package dlock

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics is shared by Lockers with one Registerer; tell them apart with prometheus.WrapRegistererWith.
type metrics struct {
	attempts, successes, timeouts prometheus.Counter
	acquireSeconds, heldSeconds   prometheus.Histogram
	renewals, lost                prometheus.Counter
	nonOwner, nonOwnerApplied     prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	var errs []error
	m := &metrics{
		attempts:  counter(reg, &errs, "dlock_acquire_attempts_total", "Calls of Acquire and TryAcquire."),
		successes: counter(reg, &errs, "dlock_acquire_successes_total", "Calls of Acquire and TryAcquire that were granted."),
		timeouts:  counter(reg, &errs, "dlock_acquire_timeouts_total", "Calls of Acquire and TryAcquire whose context ended first."),
		acquireSeconds: histogram(reg, &errs, "dlock_acquire_duration_seconds",
			"Time from the call to the grant, of calls that were granted.", prometheus.ExponentialBuckets(50e-6, 2, 20)),
		heldSeconds: histogram(reg, &errs, "dlock_held_seconds",
			"Time from the grant to the release or loss of the lease.", prometheus.ExponentialBuckets(100e-6, 4, 12)),
		renewals: counter(reg, &errs, "dlock_renewals_total", "Renewals that the lock service confirmed."),
		lost:     counter(reg, &errs, "dlock_leases_lost_total", "Leases that were lost, or had to be presumed lost, before their release."),
		nonOwner: counter(reg, &errs, "release_by_non_owner_total",
			"Releases of a lock that was no longer the releaser's."),
		nonOwnerApplied: counter(reg, &errs, "release_by_non_owner_applied_total",
			"Releases that freed another owner's lock. Stays 0 with a correct backend."),
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("dlock: register metrics: %w", err)
	}
	return m, nil
}

func counter(reg prometheus.Registerer, errs *[]error, name, help string) prometheus.Counter {
	return register(reg, errs, prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help}))
}

func histogram(reg prometheus.Registerer, errs *[]error, name, help string, buckets []float64) prometheus.Histogram {
	return register(reg, errs, prometheus.NewHistogram(prometheus.HistogramOpts{
		Name: name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160, NativeHistogramMinResetDuration: time.Hour,
	}))
}

// register adds c to reg, or returns the collector that another Locker has added.
func register[C prometheus.Collector](reg prometheus.Registerer, errs *[]error, c C) C {
	if reg == nil {
		return c
	}
	err := reg.Register(c)
	if are, ok := errors.AsType[prometheus.AlreadyRegisteredError](err); ok {
		if old, ok := are.ExistingCollector.(C); ok {
			return old
		}
	}
	if err != nil {
		*errs = append(*errs, err)
	}
	return c
}
