package load_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fencelab/fencelab/internal/bench/load"
)

// TestOrder compares with a count of all pairs.
func TestOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 60).Draw(t, "n")
		tokens := rapid.Bool().Draw(t, "tokens")
		seqs := rapid.Permutation(numbers(n)).Draw(t, "arrivals")
		grants := rapid.Permutation(numbers(n)).Draw(t, "grants")
		all := make([]load.Outcome, n)
		for i := range all {
			all[i] = load.Outcome{Key: rapid.Uint64Range(0, 2).Draw(t, "key"), Seq: seqs[i]}
			if rapid.IntRange(0, 5).Draw(t, "served") == 0 {
				continue
			}
			all[i].Grant = grants[i]
			if tokens {
				all[i].Fence, all[i].Grant = grants[i], seqs[(i+1)%n] // the token decides, and not what was seen first
			}
		}
		before := func(a, b load.Outcome) bool { // a was granted before b
			switch {
			case a.Grant == 0 || b.Grant == 0:
				return a.Grant != 0 || b.Grant == 0 && a.Seq < b.Seq
			case tokens:
				return a.Fence < b.Fence
			}
			return a.Grant < b.Grant
		}
		o, sorted, got := load.Overtaken(all)
		require.ElementsMatch(t, all, sorted)
		var want load.Order
		want.By, want.Count = o.By, int64(n)
		for i, x := range sorted {
			var times int64
			for _, y := range all {
				if x.Key == y.Key && x.Seq != y.Seq {
					want.Pairs++
					if y.Seq > x.Seq && before(y, x) {
						times++
					}
				}
			}
			require.Equal(t, times, got[i], "%+v", x)
			want.Inversions += times
			want.Max = max(want.Max, times)
			if times > 0 {
				want.Reordered++
			}
		}
		want.Pairs /= 2
		require.Equal(t, [4]int64{want.Pairs, want.Inversions, want.Reordered, want.Max}, [4]int64{o.Pairs, o.Inversions, o.Reordered, o.Max})
	})
}

func numbers(n int) []uint64 {
	all := make([]uint64, n)
	for i := range all {
		all[i] = uint64(i) + 1
	}
	return all
}
