package load

import (
	"cmp"
	"math"
	"slices"
)

// order sorts outcomes by key and order of grants, and counts how often each was overtaken.
func order(all []outcome) (o Order, overtaken []int64) {
	o.Count = int64(len(all))
	for _, x := range all {
		if x.grant != 0 && o.By != "grant" {
			o.By = "token"
			if x.fence == 0 {
				o.By = "grant"
			}
		}
	}
	place := func(x outcome) uint64 {
		switch {
		case x.grant == 0:
			return math.MaxUint64 // last
		case o.By == "token":
			return x.fence
		}
		return x.grant
	}
	slices.SortFunc(all, func(a, b outcome) int {
		return cmp.Or(cmp.Compare(a.key, b.key), cmp.Compare(place(a), place(b)), cmp.Compare(a.seq, b.seq))
	})
	overtaken = make([]int64, 0, len(all))
	for group := range chunks(all) {
		overtaken = append(overtaken, overtakes(group)...)
		n := int64(len(group))
		o.Pairs += n * (n - 1) / 2
	}
	for _, n := range overtaken {
		o.Inversions += n
		if n > 0 {
			o.Reordered++
		}
	}
	if len(all) == 0 {
		return o, overtaken
	}
	o.Mean = float64(o.Inversions) / float64(len(all))
	sorted := slices.Sorted(slices.Values(overtaken))
	at := func(q float64) int64 { return sorted[int(math.Ceil(q*float64(len(sorted))))-1] }
	o.P50, o.P99, o.Max = at(0.5), at(0.99), at(1)
	return o, overtaken
}

// chunks yields the parts of all that have the same key.
func chunks(all []outcome) func(yield func([]outcome) bool) {
	return func(yield func([]outcome) bool) {
		for len(all) > 0 {
			n := 1
			for n < len(all) && all[n].key == all[0].key {
				n++
			}
			if !yield(all[:n]) {
				return
			}
			all = all[n:]
		}
	}
}

// overtakes returns for each of group, which is in the order of grants, how many of those before it arrived after it: a
// Fenwick tree over the ranks of arrival counts those that have been granted.
func overtakes(group []outcome) []int64 {
	seqs := make([]uint64, len(group))
	for i, x := range group {
		seqs[i] = x.seq
	}
	slices.Sort(seqs)
	tree := make([]int64, len(group)+1)
	counts := make([]int64, len(group))
	for i, x := range group {
		rank, _ := slices.BinarySearch(seqs, x.seq)
		earlier := int64(0)
		for j := rank; j > 0; j -= j & -j {
			earlier += tree[j]
		}
		counts[i] = int64(i) - earlier
		for j := rank + 1; j < len(tree); j += j & -j {
			tree[j]++
		}
	}
	return counts
}
