package scenarios

import (
	"fmt"
	"time"

	"github.com/fencelab/fencelab/scenarios/history"
)

// tooEarly reports what only times show: grants before the victim's lease could have expired, and locks that don't renew.
func tooEarly(s *Scenario, events []history.Event) (why []string) {
	add := func(format string, args ...any) { why = append(why, fmt.Sprintf(format, args...)) }
	var holder history.Event // of a victim that believes it holds the lock
	for _, e := range events {
		switch {
		case e.Kind == history.KindFault && fault(e.Name).State == history.Down && e.Target == holder.Actor:
			holder = history.Event{} // a service that detects the death may grant earlier
		case e.Kind != history.KindReport:
		case e.Name == history.Acquired:
			if early := holder.Until.Sub(e.Time); early > 0 {
				add("%s was granted the lock %v before the end of %s's lease", e.Actor, early, holder.Actor)
			}
			maxHold, ttl := time.Duration(s.Workers[holder.Actor].MaxHold), time.Duration(holder.TTL)
			switch after := e.Time.Sub(holder.Time); {
			case maxHold == 0:
			case ttl >= maxHold:
				add("%s's lease of %v outlasts its renewals, which end after %v: choose a shorter TTL", holder.Actor, ttl, maxHold)
			case after < maxHold:
				add("%s was granted the lock %v after %s, whose lease was to be renewed for %v", e.Actor, after, holder.Actor, maxHold)
			}
			holder = history.Event{}
			if s.Workers[e.Actor].Victim {
				holder = e
			}
		case e.Actor == holder.Actor && (e.Name == history.Released || e.Name == history.Lost):
			holder = history.Event{}
		}
	}
	return why
}
