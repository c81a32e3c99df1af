package load

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Merge adds up the results of several processes of one run. Quantiles of samples and of the order can't be added: it
// has the greatest. No process has seen another's arrivals.
func Merge(results []*Result) (*Result, error) {
	if len(results) == 0 {
		return nil, errors.New("load: no results to merge")
	}
	m := *results[0]
	m.Share.Counts, m.Samples, m.Parts = slices.Clone(m.Share.Counts), slices.Clone(m.Samples), slices.Clone(m.Parts)
	m.Errors = maps.Clone(m.Errors)
	for _, r := range results[1:] {
		if err := m.add(r); err != nil {
			return nil, err
		}
	}
	m.SectionsPerS = float64(m.Sections) / m.Seconds
	if m.Order.Count > 0 {
		m.Order.Mean = float64(m.Order.Inversions) / float64(m.Order.Count)
	}
	if len(m.Share.Counts) > 0 {
		starved := m.Share.Starved
		m.Share = share(m.Share.Counts)
		m.Share.Starved = starved
	}
	return &m, nil
}

func (m *Result) add(r *Result) error {
	by := cmp.Or(r.Order.By, m.Order.By)
	if cmp.Or(m.Order.By, by) != by {
		return fmt.Errorf("load: one result has the order of grants by %s, another by %s", m.Order.By, by)
	}
	m.Order.By = by
	m.Config.Contenders += r.Config.Contenders
	m.Config.Connections += r.Config.Connections
	m.Config.Processes += r.Config.Processes
	m.Config.Rate += r.Config.Rate
	m.Parts = append(m.Parts, r.Parts...)
	if r.Start.Before(m.Start) {
		m.Start = r.Start
	}
	m.Seconds = max(m.Seconds, r.Seconds)
	m.Cut = m.Cut || r.Cut
	for kind, e := range r.Errors {
		if m.Errors == nil {
			m.Errors = map[string]Errors{}
		}
		m.Errors[kind] = Errors{m.Errors[kind].Count + e.Count, cmp.Or(m.Errors[kind].Example, e.Example)}
	}
	to, from := m.latencies(), r.latencies()
	for i := range to {
		if err := to[i].add(*from[i]); err != nil {
			return err
		}
	}
	sums, more := m.counts(), r.counts()
	for i := range sums {
		*sums[i] += *more[i]
	}
	m.Order.P50, m.Order.P99 = max(m.Order.P50, r.Order.P50), max(m.Order.P99, r.Order.P99)
	m.Order.Max = max(m.Order.Max, r.Order.Max)
	m.Share.Counts = append(m.Share.Counts, r.Share.Counts...)
	m.Share.Starved += r.Share.Starved
	for i, s := range r.Samples {
		if i == len(m.Samples) {
			m.Samples = append(m.Samples, Sample{T: s.T})
		}
		t := &m.Samples[i]
		t.Sections += s.Sections
		t.Failed += s.Failed
		t.Waiting += s.Waiting
		t.P50, t.P99 = max(t.P50, s.P50), max(t.P99, s.P99)
	}
	return nil
}

func (m *Result) latencies() []*Latency {
	return []*Latency{&m.Wait, &m.Unserved, &m.Hold, &m.Release, &m.Pacer, &m.FailedAfter}
}

// counts can be added up.
func (m *Result) counts() []*int64 {
	return []*int64{
		&m.Arrivals, &m.Sections, &m.Failed, &m.BacklogStart, &m.MaxWaiting, &m.Unstarted,
		&m.Order.Count, &m.Order.Inversions, &m.Order.Pairs, &m.Order.Reordered,
		&m.Checks.Overlaps, &m.Checks.TokenRegressions, &m.Checks.Late,
	}
}
