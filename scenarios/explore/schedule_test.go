package explore_test

import (
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
		"fly A":       `line 1, "fly A": there is no verb "fly"; there are [run try`,
		"run A\nrun":  `line 2, "run": it wants a worker, as in "run A"`,
		"run AB":      `it wants a worker`,
		"run F":       `it wants a worker`,
		"wait long":   `it wants how long, as in "wait 1s"`,
		"wait -1s":    `it wants how long`,
		"cut A":       `it wants a worker, how many messages pass before`,
		"cut A -1":    `it wants a worker, how many`,
		"cut A 0 x":   `and perhaps a server`,
		"wipe one":    `it wants a server's number, as in "wipe 0"`,
		"jump 0":      `it wants a server's number and how far, as in "jump 0 5s"`,
		"jump 0 soon": `it wants a server's number and how far`,
	} {
		_, err := explore.Parse(bad)
		require.ErrorContains(t, err, want, "%q", bad)
	}
}

// A random schedule is the same text when it is read again.
func TestRandom(t *testing.T) {
	for _, sys := range systems {
		for seed := range uint64(50) {
			s := sys.Random(seed, 30)
			again, err := explore.Parse(s.String())
			require.NoError(t, err)
			require.Equal(t, s, again)
			require.Equal(t, s, sys.Random(seed, 30))
		}
	}
}
