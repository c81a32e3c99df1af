package dlock

import (
	"context"
	"time"
)

// Backend is a driver for a lock service. [Locker] adds what all backends share.
//
// An implementation must keep these rules; package dlocktest checks each under the name in brackets:
//
//  1. A key has at most one live grant, until its TTL has run out on the server's clock [Exclusive].
//  2. A grant's Fence is at least 1 and greater than that of every earlier grant of the key, however those ended
//     [TokensIncrease, TokensSurviveExpiry]. It is minted no later than the grant, never read afterwards [TokenMintedWithGrant].
//  3. A grant's Start is no later than the moment at which the server began to count its TTL or Provisional: in practice,
//     just before the request was sent [StartBeforeRequest].
//  4. TryAcquire of a held key returns [ErrHeld] and leaves nothing behind [TryHeld].
//  5. Acquire returns once granted: after a release [WaiterWakes] or an expiry [WaiterOutlivesHolder]. When ctx ends
//     first, it returns an error that wraps ctx's cause, and the waiter blocks nobody [WaiterCancelled], nor do many waiters
//     whose messages were lost [WaitersCutOff]. It polls only if the server can't notify [WaiterIsTold]. It calls
//     [Request.NoteHeld] [WaiterCancelled].
//  6. A request that the client library repeats after a lost reply has the same Owner and is the same acquisition: same
//     Fence, a lease that restarts, no waiting for itself [RetrySameOwner]. The Locker never reuses an Owner.
//  7. Renew makes the lease run for its TTL from now, if Owner still holds it [RenewExtends]; otherwise it changes
//     nothing and returns [ErrLost] [RenewByNonOwner]. Check and effect are atomic [RenewAtomic].
//  8. Release frees the key, if Owner still holds it; otherwise it changes nothing and returns [ErrLost]
//     [ReleaseByNonOwner], even if it is repeated after its Backend has locked the key again [ReleaseRepeated]. Check and effect
//     are atomic [ReleaseAtomic].
//  9. An error that doesn't wrap [ErrHeld], [ErrQueueFull], [ErrLost], [ErrInvalid] or [ErrClosed], and any error after
//     ctx's end, leaves the outcome unknown. After such an acquire the Locker calls Release with the request's Key, Owner
//     and TTL, which must undo it [AcquireReplyLost, AcquireRequestLost]; after such a renewal or release the lease is not
//     known to be lost [RenewReplyLost, RenewRequestLost, ReleaseReplyLost, ReleaseRequestLost].
//  10. An unreachable server yields an error, never a grant [Unreachable], and so does one that refuses, such as a full one, at
//     once [Refused]; a silent one blocks no call for ever [Silent].
//  11. Keys are independent [KeysIndependent]; every key that [CheckKey] accepts works or is refused with [ErrInvalid]
//     [AwkwardKeys].
//  12. A TTL that is not positive, or that the server cannot represent exactly, is refused with [ErrInvalid], not rounded
//     [TTLNotRounded].
//  13. A grant outlives the ctx of its request [GrantOutlivesContext]. After Close every method returns [ErrClosed] and
//     leases stay; Close doesn't close the client library's client, and may be called again [Closed].
//
// An Acquire whose error wraps [ErrLost] has lost its place in the queue; the Locker's caller gets [ErrRequestLost].
//
// Methods may be called concurrently. A call that waits for another holder returns soon after ctx ends; one that waits for a
// reply may last until the client library's own timeout.
type Backend interface {
	Acquire(ctx context.Context, r Request) (Grant, error)
	TryAcquire(ctx context.Context, r Request) (Grant, error)
	Renew(ctx context.Context, g Grant) error
	Release(ctx context.Context, g Grant) error
	Close() error
}

// Request asks a [Backend] for a lease.
type Request struct {
	Key   string
	Owner string        // a random UUID, used for this acquisition only
	TTL   time.Duration // how long the lease lasts unless it is renewed

	OnHeld func() // what NoteHeld calls, unless it is nil
}

// NoteHeld is called at least once by an Acquire that waits, when the server has said that another holds the lock. If ctx
// then ends, the error of [Locker.Acquire] wraps [ErrHeld]; otherwise it says that the lock service has not answered.
func (r Request) NoteHeld() {
	if r.OnHeld != nil {
		r.OnHeld()
	}
}

// Grant is a lease that a [Backend] has given.
type Grant struct {
	Key   string
	Owner string
	Fence uint64        // the fencing token
	TTL   time.Duration // the lease as granted; a server may have raised it
	Start time.Time     // no later than when the server began to count TTL; see rule 3

	// Provisional, if not 0, is how long the lease lasts until its first renewal; from then on it lasts for TTL, which is longer.
	// So a lock handed to a dead waiter is soon free again. The Locker renews it halfway through, unless the lock has been
	// released.
	Provisional time.Duration

	// Lost, if not nil, is closed when the backend learns that the lease is gone. The Locker's timer ends the lease even without
	// it.
	Lost <-chan struct{}
	// State is the backend's own, passed back to Renew and Release; nil in a Release that undoes a request without a grant.
	State any
}

func (r Request) grant() Grant { return Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL} }
