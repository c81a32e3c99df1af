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
//   - [Link.Cut]: a network partition.
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
