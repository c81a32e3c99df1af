package load

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestOrder compares with a count of all pairs.
func TestOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 60).Draw(t, "n")
		tokens := rapid.Bool().Draw(t, "tokens")
		seqs := rapid.Permutation(numbers(n)).Draw(t, "arrivals")
		grants := rapid.Permutation(numbers(n)).Draw(t, "grants")
		all := make([]outcome, n)
		for i := range all {
			all[i] = outcome{key: rapid.Uint64Range(0, 2).Draw(t, "key"), seq: seqs[i]}
			if rapid.IntRange(0, 5).Draw(t, "served") == 0 {
				continue
			}
			all[i].grant = grants[i]
			if tokens {
				all[i].fence, all[i].grant = grants[i], seqs[(i+1)%n] // tokens take precedence
			}
		}
		before := func(a, b outcome) bool {
			switch {
			case a.grant == 0 || b.grant == 0:
				return a.grant != 0 || b.grant == 0 && a.seq < b.seq
			case tokens:
				return a.fence < b.fence
			}
			return a.grant < b.grant
		}
		sorted := slices.Clone(all)
		o, got := order(sorted)
		require.ElementsMatch(t, all, sorted)
		var want Order
		for i, x := range sorted {
			var times int64
			for _, y := range all {
				if x.key == y.key && y.seq > x.seq && before(y, x) {
					times++
				}
			}
			require.Equal(t, times, got[i], "%+v", x)
			want.Inversions += times
			want.Max = max(want.Max, times)
			if times > 0 {
				want.Reordered++
			}
		}
		require.Equal(t, [3]int64{want.Inversions, want.Reordered, want.Max}, [3]int64{o.Inversions, o.Reordered, o.Max})
	})
}

func numbers(n int) []uint64 {
	all := make([]uint64, n)
	for i := range all {
		all[i] = uint64(i) + 1
	}
	return all
}
