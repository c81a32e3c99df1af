package load

import (
	"errors"
	"fmt"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics is the load as Prometheus sees it, warm-up and all. The histograms are native ones: their buckets are the same
// in every process, so that quantiles over many pods are computed from sums.
type metrics struct {
	arrivals, sections prometheus.Counter
	errors             *prometheus.CounterVec
	waiting            prometheus.Gauge
	wait, hold, late   prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer) (*metrics, error) {
	histogram := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: name, Help: help,
			NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160, NativeHistogramMinResetDuration: time.Hour,
		})
	}
	m := &metrics{
		arrivals: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "contend_arrivals_total", Help: "Acquisitions that have arrived.",
		}),
		sections: prometheus.NewCounter(prometheus.CounterOpts{Name: "contend_sections_total", Help: "Acquisitions that were granted."}),
		errors: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "contend_errors_total", Help: "Acquisitions and releases that failed, by kind.",
		}, []string{"kind"}),
		waiting: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "contend_waiting", Help: "Acquisitions that have arrived and wait for their grant.",
		}),
		wait: histogram("contend_wait_seconds", "Time from the arrival to the grant; in the open model from when the arrival was due."),
		hold: histogram("contend_hold_seconds", "Time from the grant to the release."),
		late: histogram("contend_pacer_late_seconds", "How late arrivals were offered, in the open model."),
	}
	if reg == nil {
		return m, nil
	}
	var errs []error
	for _, c := range []prometheus.Collector{m.arrivals, m.sections, m.errors, m.waiting, m.wait, m.hold, m.late} {
		errs = append(errs, reg.Register(c))
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("load: register metrics: %w", err)
	}
	return m, nil
}
