// Package faults breaks things on purpose, from outside: it knows processes by their pid and servers by their address,
// and nothing of what they do.
//
// Each fault stands for something that happens in production:
//
//   - [Pause]: a stop-the-world garbage collection, a virtual machine frozen while it migrates or is snapshotted, a
//     container out of CPU quota, a laptop lid. The process loses time and doesn't notice.
//   - [Kill]: a crash, the OOM killer, a node that loses power. Nothing is cleaned up.
//   - [Link.HoldRequests]: a packet that arrives late, after its sender has given up or died.
//   - [Link.LoseReplies]: a request that was applied and whose answer was lost. The sender can't know.
//   - [Link.LoseRequests]: a request that was not applied, which looks the same to its sender.
//   - [Link.Cut]: a network partition between two. [Partition]: one that runs between more, as one fault.
//   - [Link.Refuse]: a partition that says so: a host whose server has died, a firewall that rejects.
//   - [Link.DelayRequests], [Link.DelayReplies], [Link.Delay]: a slow link, one way or both.
//   - [Clock.Jump]: a server's clock that an operator, NTP or the host of a virtual machine sets, forward or back.
//   - [Clock.Rate]: a clock that drifts, or that NTP slews.
//   - [Clock.Hold]: a clock that stands still, so that several things happen at one instant.
//
// What each means to a connection, a process or a server:
//
//	              in force                                      after the heal
//	Pause         no thread runs                                it goes on, and has noticed nothing
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
// A fault is injected by a call that returns once the fault is in force, which each defines and confirms. The call
// returns a [Heal]. There is no sleeping and hoping: what is done after the one and before the other is done under the
// fault. A call that fails leaves no fault behind.
package faults

import "context"

// Heal ends a fault and returns once the fault is over. It ends the fault it came with and no other, so that calling
// it again does nothing. If it fails, for instance because ctx ended, the fault may not be over yet; it can be called
// again.
type Heal func(ctx context.Context) error
