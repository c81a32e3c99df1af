package load

import (
	"cmp"
	"math"
	"slices"
)

func order(all []outcome) (o Order, overtaken []int64) {
	o.Count = int64(len(all))
	if o.Count == 0 {
		return o, nil
	}
	for _, x := range all {
		if x.grant != 0 && o.By != "grant" {
			o.By = "token"
			if x.fence == 0 {
				o.By = "grant"
			}
		}
	}
	rank := func(x outcome) uint64 {
		switch {
		case x.grant == 0:
			return math.MaxUint64 // last
		case o.By == "token":
			return x.fence
		}
		return x.grant
	}
	slices.SortFunc(all, func(a, b outcome) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(rank(a), rank(b)), cmp.Compare(a.seq, b.seq))
	})
	var before []uint64 // arrivals of the key granted before, sorted; a new one is mostly the last
	for i, x := range all {
		if i > 0 && x.key != all[i-1].key {
			before = before[:0]
		}
		at, _ := slices.BinarySearch(before, x.seq)
		n := int64(len(before) - at)
		before = slices.Insert(before, at, x.seq)
		overtaken = append(overtaken, n)
		o.Inversions += n
		o.Reordered += min(n, 1)
	}
	o.Mean = float64(o.Inversions) / float64(o.Count)
	sorted := slices.Sorted(slices.Values(overtaken))
	o.P99, o.Max = sorted[int(math.Ceil(0.99*float64(len(sorted))))-1], sorted[len(sorted)-1]
	return o, overtaken
}
