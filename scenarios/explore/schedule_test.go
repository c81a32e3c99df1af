package explore_test

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/explore"
)

func TestParse(t *testing.T) {
	text := "run A\ntry B\ncut A 0\nhold C 2 1\nwait 1.1s\nwipe 0\njump 2 500ms\nmend A\n"
	s, err := explore.Parse("# a comment\n\n" + text)
	require.NoError(t, err)
	require.Equal(t, text, s.String())
	for bad, want := range map[string]string{
		"fly A":       `line 1, "fly A": unknown verb "fly"; the verbs are [run try`,
		"run A\nrun":  `line 2, "run": want run worker; a worker is A to E`,
		"run AB":      `want run worker`,
		"run F":       `want run worker`,
		"run A 1":     `want run worker`,
		"wait long":   `want wait duration; `,
		"wait -1s":    `want wait duration`,
		"cut A":       `want cut worker n [server]`,
		"cut A -1":    `want cut worker n [server]`,
		"cut A 0 x":   `want cut worker n [server]`,
		"cut A 0 -1":  `want cut worker n [server]`,
		"cut A 0 1 2": `want cut worker n [server]`,
		"pause A x":   `want pause worker [n]`,
		"wipe one":    `want wipe server`,
		"jump 0":      `want jump server duration`,
		"jump 0 soon": `want jump server duration`,
	} {
		_, err := explore.Parse(bad)
		require.ErrorContains(t, err, want, "%q", bad)
	}
}

func TestRandom(t *testing.T) {
	for _, sys := range slices.Concat(systems, others) {
		for seed := range uint64(50) {
			s := sys.Random(seed, 30)
			again, err := explore.Parse(s.String())
			require.NoError(t, err)
			require.Equal(t, s, again)
			require.Equal(t, s, sys.Random(seed, 30))
		}
	}
}

func TestRandomWorkers(t *testing.T) {
	count := map[int]int{}
	for seed := range uint64(800) {
		last := 0
		for _, st := range systems[0].Random(seed, 24) {
			last = max(last, st.Worker)
		}
		count[last]++
	}
	require.Positive(t, count[explore.MaxWorkers-1])
	require.InDelta(t, 100, count[3]+count[4], 20, "%v", count)
}
