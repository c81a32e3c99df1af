package load

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Native histograms have the same buckets in every process, so Prometheus can compute quantiles over several.
type metrics struct {
	arrivals, sections prometheus.Counter
	errors             *prometheus.CounterVec
	waiting            prometheus.Gauge
	wait, hold, late   prometheus.Histogram
}

func newMetrics(reg prometheus.Registerer) *metrics {
	to := promauto.With(reg)
	histogram := func(name, help string) prometheus.Histogram {
		return to.NewHistogram(prometheus.HistogramOpts{
			Name: name, Help: help,
			NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160, NativeHistogramMinResetDuration: time.Hour,
		})
	}
	return &metrics{
		arrivals: to.NewCounter(prometheus.CounterOpts{Name: "contend_arrivals_total", Help: "Acquisitions that have arrived."}),
		sections: to.NewCounter(prometheus.CounterOpts{Name: "contend_sections_total", Help: "Acquisitions that were granted."}),
		errors: to.NewCounterVec(prometheus.CounterOpts{
			Name: "contend_errors_total", Help: "Acquisitions and releases that failed, by kind.",
		}, []string{"kind"}),
		waiting: to.NewGauge(prometheus.GaugeOpts{Name: "contend_waiting", Help: "Acquisitions that wait for their grant."}),
		wait:    histogram("contend_wait_seconds", "Time from the arrival to the grant; in the open model from when the arrival was due."),
		hold:    histogram("contend_hold_seconds", "Time from the grant to the release."),
		late:    histogram("contend_pacer_late_seconds", "How late arrivals were offered, in the open model."),
	}
}
