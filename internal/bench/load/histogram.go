package load

import (
	"fmt"
	"math"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"
)

// histogram has times from 100 ns to an hour, with 3 significant digits. Longer ones count as an hour.
type histogram struct{ *hdr.Histogram }

func newHistogram() histogram { return histogram{hdr.New(100, int64(time.Hour), 3)} }

func (h histogram) record(d time.Duration) {
	if err := h.RecordValue(int64(min(max(d, 0), time.Hour))); err != nil {
		panic(err)
	}
}

func (h histogram) quantile(percent float64) float64 {
	return millis(float64(h.ValueAtQuantile(percent)))
}

func (h histogram) latency() Latency {
	if h.TotalCount() == 0 {
		return Latency{}
	}
	encoded, err := h.Encode(hdr.V2CompressedEncodingCookieBase)
	if err != nil {
		panic(err) // to memory
	}
	return Latency{
		Count: h.TotalCount(), Mean: millis(h.Mean()), Min: millis(float64(h.Min())),
		P50: h.quantile(50), P90: h.quantile(90), P99: h.quantile(99), P999: h.quantile(99.9), Max: millis(float64(h.Max())),
		HDR: string(encoded),
	}
}

// millis rounds to 0.1 µs.
func millis(ns float64) float64 { return math.Round(ns/100) / 1e4 }

func (l *Latency) histogram() (histogram, error) {
	if l.Count == 0 {
		return newHistogram(), nil
	}
	h, err := hdr.Decode([]byte(l.HDR))
	if err != nil {
		return histogram{}, fmt.Errorf("load: a histogram can't be decoded: %w", err)
	}
	if h.TotalCount() != l.Count {
		return histogram{}, fmt.Errorf("load: a histogram of %d values says that it has %d", h.TotalCount(), l.Count)
	}
	return histogram{h}, nil
}
