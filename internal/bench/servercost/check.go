package servercost

import (
	"errors"
	"fmt"
	"slices"
)

// Phases are the ends of a run's phases by name; of a repeated name, the second has "2" appended.
func Phases(lines []Line, run string) map[string]Line {
	all := map[string]Line{}
	for _, l := range lines {
		if l.Kind != KindPhase || l.Run != run {
			continue
		}
		name := l.Phase
		for n := 2; all[name].Kind != ""; n++ {
			name = fmt.Sprint(l.Phase, n)
		}
		all[name] = l
	}
	return all
}

type checker struct {
	lines  []Line
	run    string
	phases map[string]Line
	errs   []error
}

func (c *checker) require(ok bool, format string, args ...any) {
	if !ok {
		c.errs = append(c.errs, fmt.Errorf("servercost: %s: %s", c.run, fmt.Sprintf(format, args...)))
	}
}

// begin selects a run, and requires that it has the phases.
func (c *checker) begin(run string, phases ...string) bool {
	c.run, c.phases = run, Phases(c.lines, run)
	before := len(c.errs)
	for _, name := range phases {
		l, ok := c.phases[name]
		c.require(ok && (l.Redis != nil || l.Etcd != nil), "there is no phase %q", name)
	}
	return len(c.errs) == before
}

// Check returns an error if the lines contradict what their config must lead to on any machine: every lock taken, no
// expired lease blocking, no token regressing.
func Check(lines []Line) error {
	if len(lines) == 0 || lines[0].Setup == nil {
		return errors.New("servercost: the first line is not the setup")
	}
	want, c := lines[0].Setup.Config, &checker{lines: lines}
	if want.Redis != nil {
		c.active(want.Redis)
		c.lazy(want.Redis)
	}
	if want.Etcd != nil {
		c.shared(want.Etcd)
		c.leases(want.Etcd)
	}
	if want.Tokens != nil {
		c.tokens()
	}
	return errors.Join(c.errs...)
}

func (c *checker) active(want *RedisConfig) {
	if !c.begin("redis active", "fill", "drain", "use", "reap", "purge2", "reuse") {
		return
	}
	fill, drain, reap, after := c.phases["fill"], c.phases["drain"], c.phases["reap"], c.phases["purge2"]
	use, reuse := c.phases["use"], c.phases["reuse"]
	c.require(fill.Count == want.Keys, "%d locks were taken, not %d", fill.Count, want.Keys)
	c.require(drain.Redis.Expires == 0, "%d keys still have a TTL", drain.Redis.Expires)
	c.require(drain.Redis.Keys == want.Keys, "%d keys are left, not a counter for each of %d", drain.Redis.Keys, want.Keys)
	c.require(drain.Redis.ExpiredKeys == want.Keys, "%d keys expired, not %d", drain.Redis.ExpiredKeys, want.Keys)
	c.require(reap.Count == want.Keys, "%d counters were reaped, not %d", reap.Count, want.Keys)
	c.require(after.Redis.Keys == 1, "%d keys are left, not the floor alone", after.Redis.Keys)
	c.require(reuse.Count == want.Check && reuse.Values["greater"] == float64(want.Check),
		"of %d tokens %v are greater than the one before", want.Check, reuse.Values["greater"])
	c.require(reuse.Values["greatest"] == use.Values["greatest"]+1, "tokens go on from %v with %v", use.Values["greatest"], reuse.Values["greatest"])
}

func (c *checker) lazy(want *RedisConfig) {
	if !c.begin("redis lazy", "fill", "expire", "touch", "reclaim", "purge") {
		return
	}
	for _, name := range []string{"fill", "expire"} {
		s := c.phases[name].Redis
		c.require(s.Keys == 2*want.Keys && s.Expires == want.Keys && s.ExpiredKeys == 0,
			"%s: %d keys, %d with a TTL, %d expired: want %d, %d and none", name, s.Keys, s.Expires, s.ExpiredKeys, 2*want.Keys, want.Keys)
	}
	touch, reclaim := c.phases["touch"], c.phases["reclaim"]
	c.require(touch.Count == want.Check && touch.Values["second_token"] == float64(want.Check),
		"of %d locks that had expired %v were granted again, with the token 2", want.Check, touch.Values["second_token"])
	c.require(touch.Redis.ExpiredKeys == want.Check, "%d keys were deleted on access, not %d", touch.Redis.ExpiredKeys, want.Check)
	c.require(reclaim.Count == want.Keys-want.Check, "%d keys were deleted once that was allowed, not %d", reclaim.Count, want.Keys-want.Check)
	c.require(reclaim.Redis.Keys == want.Keys, "%d keys are left, not a counter for each of %d", reclaim.Redis.Keys, want.Keys)
}

func (c *checker) shared(want *EtcdConfig) {
	if !c.begin("etcd shared", "empty", "fill", "release", "compact", "defrag") {
		return
	}
	empty, fill, release := c.phases["empty"].Etcd, c.phases["fill"].Etcd, c.phases["release"].Etcd
	defrag := c.phases["defrag"].Etcd
	c.require(fill.Keys == want.Keys && release.Keys == 0, "%d keys after the fill and %d after the release", fill.Keys, release.Keys)
	c.require(fill.LeasesGranted == 1, "%d leases, not one", fill.LeasesGranted)
	c.require(fill.Revision-empty.Revision == want.Keys, "%d locks took %d revisions", want.Keys, fill.Revision-empty.Revision)
	c.require(release.Revision-fill.Revision == want.Keys, "%d releases took %d revisions", want.Keys, release.Revision-fill.Revision)
	c.require(defrag.Revision == release.Revision, "the revision went from %d to %d", release.Revision, defrag.Revision)
}

func (c *checker) leases(want *EtcdConfig) {
	if !c.begin("etcd leases", "empty", "fill", "expire") {
		return
	}
	fill, expire := c.phases["fill"].Etcd, c.phases["expire"].Etcd
	c.require(fill.LeasesGranted == want.Leases, "%d leases, not %d", fill.LeasesGranted, want.Leases)
	c.require(expire.LeasesRevoked == want.Leases && expire.Keys == 0, "%d leases are gone, and %d keys are left", expire.LeasesRevoked, expire.Keys)
	c.require(expire.Revision-c.phases["empty"].Etcd.Revision == 2*want.Leases, "revision %d: want one for each put and each expiry", expire.Revision)
}

func (c *checker) tokens() {
	c.begin("tokens")
	tokens, costs := map[string]*Tokens{}, 0
	for _, l := range c.lines {
		switch l.Kind {
		case KindTokens:
			tokens[l.Tokens.Source] = l.Tokens
		case KindCost:
			costs++
			c.require(l.Cost.P50 > 0 && l.Cost.P99 >= l.Cost.P50 && l.Cost.PerSecond > 0, "%s was not measured", l.Cost.Source)
		}
	}
	c.require(costs == 7, "%d sources, not 7", costs)
	counter, revision := tokens["`redislock`"], tokens["`etcdlock`"]
	if counter == nil || revision == nil {
		c.require(false, "the tokens of a lock are missing")
		return
	}
	c.require(slices.Equal(counter.A, []uint64{1, 2, 3}) && slices.Equal(counter.B, []uint64{1, 2}),
		"a counter for each key gave %v and %v", counter.A, counter.B)
	a, b := revision.A, revision.B
	c.require(len(a) == 3 && len(b) == 2 && a[0] < b[0] && b[0] < a[1] && a[1] < b[1] && b[1] < a[2],
		"revisions %v and %v of keys locked alternately don't grow across them", a, b)
}
