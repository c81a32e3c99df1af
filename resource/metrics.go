package resource

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	stale, writes, reads prometheus.Counter
	seconds              *prometheus.HistogramVec
}

func newMetrics(r prometheus.Registerer) (metrics, error) {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	}
	m := metrics{
		stale: counter("resource_stale_token_rejections_total",
			"Writes and fenced reads refused because of a stale fencing token, repeats of an applied write included."),
		writes: counter("resource_writes_accepted_total", "Writes that took effect."),
		reads:  counter("resource_reads_accepted_total", "Reads that returned a record, fenced or not."),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "resource_request_duration_seconds",
			Help:    "Time from a request's header to its reply, by operation.",
			Buckets: prometheus.ExponentialBuckets(50e-6, 2, 16), // 50 µs to 1.6 s
		}, []string{"op"}),
	}
	if r == nil {
		return m, nil
	}
	for _, c := range []prometheus.Collector{m.stale, m.writes, m.reads, m.seconds} {
		if err := r.Register(c); err != nil {
			return metrics{}, err
		}
	}
	return m, nil
}

func (m metrics) observe(op string, start time.Time) {
	m.seconds.WithLabelValues(op).Observe(time.Since(start).Seconds())
}
