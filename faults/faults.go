// Package faults injects real faults from outside, into processes by pid and into connections to a server. What each stands for:
//
//   - [Pause]: garbage collection, a frozen or migrating virtual machine, an exhausted CPU quota, a closed laptop lid.
//   - [Kill]: a crash, the OOM killer, a power failure.
//   - [Link.HoldRequests]: a packet that arrives after its sender has given up or died.
//   - [Link.LoseReplies]: a request that was applied but whose reply was lost.
//   - [Link.LoseRequests]: a request that was not applied, which its sender can't tell from a lost reply.
//   - [Link.Cut]: a network partition.
//   - [Link.Delay], [Link.DelayReplies], [Link.DelayRequests]: a slow network or server.
//   - [Link.Refuse]: a host whose server has died, a firewall that rejects.
//   - [Clock.Jump]: a clock set by an operator, NTP or a hypervisor.
//   - [Clock.Rate]: a clock that drifts, or that NTP slews.
//
// A call that injects a fault returns once it is in force; if it fails, it leaves no fault behind.
package faults

import (
	"context"
	"sync"
)

// Heal ends its fault only, and returns once that is done. After a success further calls do nothing; after an error, such as an
// ended ctx, the fault may still be in force.
type Heal func(ctx context.Context) error

// Once returns a Heal that calls heal until it succeeds.
func Once(heal Heal) Heal {
	var mu sync.Mutex
	healed := false
	return func(ctx context.Context) error {
		mu.Lock()
		defer mu.Unlock()
		if healed {
			return nil
		}
		err := heal(ctx)
		healed = err == nil
		return err
	}
}
