package dlock

import (
	"context"
	"time"
)

// Backend is a driver: the few operations in which lock services differ. Users call [Locker], which does once what
// every lock shares: validation, owners, the loss timer, renewal, re-entry, clean-up and metrics.
//
// An implementation must keep these rules; package dlocktest checks each under the name in brackets:
//
//  1. A key has at most one live grant; a TTL that has not run out on the server's clock keeps others out [Exclusive].
//  2. A grant's Fence is at least 1 and strictly greater than that of every earlier grant of the key, however those
//     ended [TokensIncrease, TokensSurviveExpiry]; it is minted in the same atomic step as the grant
//     [TokenMintedWithGrant].
//  3. A grant's Start is not later than the moment at which the server began to count its TTL, or its Provisional lease.
//     In practice: the time read just before the request that won was sent, never the time at which the reply came
//     [StartBeforeRequest].
//  4. TryAcquire of a held key returns [ErrHeld] and leaves nothing behind [TryHeld].
//  5. Acquire returns once granted: after a release [WaiterWakes] and after an expiry [WaiterOutlivesHolder]. When ctx
//     ends first, it returns an error that wraps ctx's cause, and the waiter no longer stands in anyone's way
//     [WaiterCancelled], nor do many whose messages were lost [WaitersCutOff]. It waits in the backend's own best way: never
//     by a bare poll where the server can tell [WaiterIsTold]. It calls [Request.NoteHeld] [WaiterCancelled].
//  6. A request that the client library repeats by itself, since its reply was lost, has the same Owner and is the same
//     acquisition: same Fence, a lease that starts anew, no waiting for itself [RetrySameOwner]. Otherwise an Owner is used
//     once: the Locker never repeats one, and a Backend whose client library never does need not recognise it.
//  7. Renew makes the lease run for its TTL from now, if Owner still holds it [RenewExtends]; otherwise it changes
//     nothing and returns [ErrLost] [RenewByNonOwner]. Check and effect are one atomic step [RenewAtomic].
//  8. Release frees the key, if Owner still holds it; otherwise it changes nothing and returns [ErrLost]
//     [ReleaseByNonOwner], and so if it comes late, when its Backend has locked the key again [ReleaseRepeated]. Check and
//     effect are one atomic step [ReleaseAtomic].
//  9. An error that doesn't wrap [ErrHeld], [ErrQueueFull], [ErrLost], [ErrInvalid] or [ErrClosed], and any error after
//     ctx's end, leaves open whether the call took effect. After an acquire the Locker then calls Release with the
//     request's Key, Owner and TTL, which must undo it [AcquireReplyLost, AcquireRequestLost]; a lease whose renewal or
//     release came to such an error is not known to be lost [RenewReplyLost, RenewRequestLost, ReleaseReplyLost,
//     ReleaseRequestLost].
//  10. A server that cannot be reached yields an error, never a grant [Unreachable]; one that is silent holds no call for
//     ever [Silent].
//  11. Keys are independent [KeysIndependent]; every key that [CheckKey] lets pass works or is refused with [ErrInvalid]
//     [AwkwardKeys].
//  12. A TTL that is not positive, or that the server cannot represent exactly, is refused with [ErrInvalid], not rounded
//     [TTLNotRounded].
//  13. A grant outlives the ctx it was asked with [GrantOutlivesContext]. After Close every method returns [ErrClosed],
//     and leases stay; Close leaves the client library's client to its owner and may be called again [Closed].
//
// An acquire that wraps [ErrLost] has lost its place in the queue; the Locker's caller gets [ErrRequestLost].
//
// Methods may be called from any number of goroutines. A call that has to wait for another holder returns soon after
// ctx ends; one that waits for a reply may take until the client library's own timeout, for which the Locker doesn't wait.
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

// NoteHeld is called by an Acquire that waits, at least once, when the server has said that another holds the lock. When
// ctx ends, the error of [Locker.Acquire] then wraps [ErrHeld]; otherwise it says that the lock service has not answered.
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
	TTL   time.Duration // the lease as granted; a server may have raised what was asked for
	Start time.Time     // not later than the moment at which the server began to count TTL; see rule 3

	// Provisional, if not 0, is how long the lease lasts unless it is renewed; from the first renewal on it lasts for TTL,
	// which is longer. So a lock that was handed to a waiter that is gone is soon free again. The Locker sends that
	// renewal by itself, after half of the time, unless the lock has been released by then.
	Provisional time.Duration

	// Lost, if not nil, is closed when the backend learns that the lease is gone, for example because its session
	// has expired. The Locker doesn't rely on it: its own timer ends the lease in time, whatever the backend learns.
	Lost <-chan struct{}
	// State is the backend's own, handed back to Renew and Release. It is nil in a Release that undoes a request
	// whose grant never arrived.
	State any
}

// grant is what is known of the grant of a request whose answer never came.
func (r Request) grant() Grant { return Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL} }
