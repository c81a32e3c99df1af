package memlock

import (
	"slices"
	"sync"
	"time"
)

// Clock is a server's clock.
type Clock interface {
	Now() time.Time
	// AfterFunc calls f in a goroutine of its own choice, no earlier than after d.
	AfterFunc(d time.Duration, f func())
}

type realClock struct{}

func (realClock) Now() time.Time                      { return time.Now() }
func (realClock) AfterFunc(d time.Duration, f func()) { time.AfterFunc(d, f) }

// ManualClock is a [Clock] that only [ManualClock.Advance] moves. Grants still start on the process's clock: a manual clock
// makes leases expire on the server, early or never, without the holder's timers knowing.
type ManualClock struct {
	mu     sync.Mutex
	now    time.Time
	alarms []alarm // by time
}

type alarm struct {
	at time.Time
	f  func()
}

// NewClock returns a clock at the Unix epoch.
func NewClock() *ManualClock { return &ManualClock{now: time.Unix(0, 0)} }

// Now implements [Clock].
func (c *ManualClock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// AfterFunc implements [Clock].
func (c *ManualClock) AfterFunc(d time.Duration, f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.alarms = append(c.alarms, alarm{c.now.Add(d), f})
	slices.SortStableFunc(c.alarms, func(a, b alarm) int { return a.at.Compare(b.at) })
}

// Advance moves the clock by d. It returns when everything that falls due has been done, each at its time.
func (c *ManualClock) Advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	end := c.now.Add(d)
	for len(c.alarms) > 0 && !c.alarms[0].at.After(end) {
		next := c.alarms[0]
		c.alarms = c.alarms[1:]
		c.now = next.at
		c.mu.Unlock()
		next.f()
		c.mu.Lock()
	}
	c.now = end
}
