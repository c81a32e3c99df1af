package load

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
)

// Merge makes one result of those of several processes that have taken part in one run. Counts and distributions are
// added, rates too. Of what can't be added (quantiles of samples and of the order) it is the greatest: no process has seen
// another's arrivals.
func Merge(results []*Result) (*Result, error) {
	if len(results) == 0 {
		return nil, errors.New("load: no results to merge")
	}
	m := *results[0]
	m.Share.Counts = slices.Clone(m.Share.Counts)
	m.Samples = slices.Clone(m.Samples)
	m.Parts = slices.Clone(m.Parts)
	m.Errors = map[string]Errors{}
	maps.Copy(m.Errors, results[0].Errors)
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
	m.Arrivals += r.Arrivals
	m.Sections += r.Sections
	m.Failed += r.Failed
	m.BacklogStart += r.BacklogStart
	m.MaxWaiting += r.MaxWaiting // at most
	m.Unstarted += r.Unstarted
	for kind, e := range r.Errors {
		sum, ok := m.Errors[kind]
		if !ok {
			sum.Example = e.Example
		}
		sum.Count += e.Count
		m.Errors[kind] = sum
	}
	for _, h := range []struct{ to, from *Latency }{
		{&m.Wait, &r.Wait},
		{&m.Unserved, &r.Unserved},
		{&m.Hold, &r.Hold},
		{&m.Release, &r.Release},
		{&m.Pacer, &r.Pacer},
		{&m.FailedAfter, &r.FailedAfter},
	} {
		if err := h.to.add(*h.from); err != nil {
			return err
		}
	}
	if by := cmp.Or(r.Order.By, m.Order.By); m.Order.By == "" || m.Order.By == by {
		m.Order.By = by
	} else {
		return fmt.Errorf("load: one result has the order of grants by %s, another by %s", m.Order.By, by)
	}
	m.Order.Count += r.Order.Count
	m.Order.Inversions += r.Order.Inversions
	m.Order.Pairs += r.Order.Pairs
	m.Order.Reordered += r.Order.Reordered
	m.Order.P50, m.Order.P99 = max(m.Order.P50, r.Order.P50), max(m.Order.P99, r.Order.P99)
	m.Order.Max = max(m.Order.Max, r.Order.Max)
	m.Share.Counts = append(m.Share.Counts, r.Share.Counts...)
	m.Share.Starved += r.Share.Starved
	m.Checks.Overlaps += r.Checks.Overlaps
	m.Checks.TokenRegressions += r.Checks.TokenRegressions
	m.Checks.Late += r.Checks.Late
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
