// Package faults injects real faults, from outside: it knows processes by pid and servers by address.
//
// What each stands for in production:
//
//   - [Pause]: a garbage collection, a virtual machine that is frozen or migrates, a container out of CPU quota, a laptop lid.
//   - [Kill]: a crash, the OOM killer, a power failure. Nothing is cleaned up.
//   - [Link.HoldRequests]: a packet that arrives late, after its sender has given up or died.
//   - [Link.LoseReplies]: a request that was applied and whose answer was lost.
//   - [Link.LoseRequests]: a request that was not applied, which looks the same to its sender.
//   - [Link.LoseRequestsFrom], [Link.LoseRepliesFrom]: either, in the middle of a call.
//   - [Link.Cut]: a network partition. [Partition]: one of several links, as one fault.
//   - [Link.Refuse]: a host whose server has died, a firewall that rejects.
//   - [Link.DelayRequests], [Link.DelayReplies], [Link.Delay]: a slow link, one way or both.
//   - [Clock.Jump]: a clock that is set by an operator, NTP or the host of a virtual machine.
//   - [Clock.Rate]: a clock that drifts, or that NTP slews.
//   - [Clock.Hold]: a clock that stands still, so that several things happen at one instant.
//
// What each does:
//
//	              in force                                      after the heal
//	Pause         no thread runs                                it runs on
//	Kill          it is gone                                    –
//	HoldRequests  nothing reaches the server; clients wait      all that was sent arrives, in order
//	LoseRequests  nothing reaches the server, ever              old connections are closed, new ones work
//	LoseReplies   requests are applied, nothing comes back      old connections are closed, new ones work
//	Cut           nothing gets through, either way              old connections are closed, new ones work
//	Partition     all of that on each of its links              the same
//	Refuse        connections are closed, new ones refused      new ones work
//	Delay*        every byte arrives, later by d                what is under way arrives at once, in order
//	Jump          the clock is d ahead                          it is set back by d
//	Rate          a second of the server's is 1/rate s          it shows the real time, and any jumps in force
//	Hold          the clock moves by jumps only                 the same
//
// A call that injects a fault returns once the fault is in force, and leaves no fault behind if it fails. What is done between
// it and its [Heal] is done under the fault.
package faults

import (
	"context"
	"sync"
)

// Heal ends the fault that it came with, and no other, and returns once that is over. Called again, it does nothing; but if it
// fails, for instance because ctx ended, the fault may not be over yet, and it can be tried again.
type Heal func(ctx context.Context) error

// Once makes a Heal of a function that must not be called again once it has succeeded.
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
