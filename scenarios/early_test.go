package scenarios_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

// A, C and D are victims with leases of 10 s. C's is to be renewed for 20 s after its grant, D's for 10 s.
func TestTooEarly(t *testing.T) {
	const ttl = 10 * time.Second
	s := &scenarios.Scenario{Workers: map[string]scenarios.Worker{
		"A": {Victim: true}, "C": {Victim: true, MaxHold: history.Duration(2 * ttl)}, "D": {Victim: true, MaxHold: history.Duration(ttl)},
	}}
	at := func(seconds int, actor, name string) history.Event {
		now := time.Unix(int64(seconds), 0)
		e := history.Event{Time: now, Actor: actor, Kind: history.KindReport, Name: name}
		switch name {
		case history.Acquired:
			e.TTL, e.Until = history.Duration(ttl), now.Add(ttl)
		case "kill":
			e.Actor, e.Kind, e.Target = "controller", history.KindFault, actor
		}
		return e
	}
	granted := func(seconds int, actor string) history.Event { return at(seconds, actor, history.Acquired) }
	const early = "B was granted the lock 1s before the end of A's lease"
	for name, c := range map[string]struct {
		events []history.Event
		want   string
	}{
		"when the lease ends":     {[]history.Event{granted(0, "A"), granted(10, "B")}, ""},
		"before":                  {[]history.Event{granted(0, "A"), granted(9, "B")}, early},
		"once":                    {[]history.Event{granted(0, "A"), granted(9, "B"), granted(9, "B")}, early},
		"released":                {[]history.Event{granted(0, "A"), at(1, "A", history.Released), granted(9, "B")}, ""},
		"has written":             {[]history.Event{granted(0, "A"), at(1, "A", history.Wrote), granted(9, "B")}, early},
		"another has released":    {[]history.Event{granted(0, "A"), at(1, "B", history.Released), granted(9, "B")}, early},
		"known to be lost":        {[]history.Event{granted(0, "A"), at(1, "A", history.Lost), granted(9, "B")}, ""},
		"killed":                  {[]history.Event{granted(0, "A"), at(1, "A", "kill"), granted(9, "B")}, ""},
		"another is killed":       {[]history.Event{granted(0, "A"), at(1, "B", "kill"), granted(9, "B")}, early},
		"no victim":               {[]history.Event{granted(0, "B"), granted(1, "A")}, ""},
		"renewed for long enough": {[]history.Event{granted(0, "C"), granted(20, "B")}, ""},
		"not renewed":             {[]history.Event{granted(0, "C"), granted(19, "B")}, "B was granted the lock 19s after C, whose lease was to be renewed for 20s"},
		"renewed for no longer":   {[]history.Event{granted(0, "D"), granted(10, "B")}, "D's lease of 10s outlasts its renewals, which end after 10s: choose a shorter TTL"},
	} {
		require.Equal(t, c.want, strings.Join(scenarios.TooEarly(s, c.events), "; "), name)
	}
}
