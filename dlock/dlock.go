// Package dlock is a distributed lock. Every grant carries a fencing token.
//
// The lock alone doesn't protect data: a holder that is frozen, cut off or slow for longer than its TTL continues after its
// successor has begun. The token does, a number that grows with every grant of a key: send it with every write, and with every
// read that a write depends on, and let the resource refuse a token older than one that it has accepted (M. Kleppmann, "How to do
// distributed locking", 2016). The TTL then affects liveness only. [Handle.Next] also numbers the calls under one token.
//
//	err := locker.Do(ctx, "billing/acme", func(ctx context.Context, h *dlock.Handle) error {
//		token, seq := h.Next()
//		return bill(ctx, token, seq)
//	})
//
// [Handle.Context] ends when the lease is lost or must be presumed so. That only saves useless work: the process can be frozen
// between checking the context and writing.
package dlock

import (
	"errors"
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxKeyLen is the longest key, in bytes, that [CheckKey] accepts.
const MaxKeyLen = 512

var (
	// ErrHeld is returned by TryAcquire when another holder has the lock, and by Acquire, along with its context's cause, when
	// the context ends after the lock service has said that another holds it.
	ErrHeld = errors.New("dlock: held by another owner")
	// ErrQueueFull is returned by Acquire when the lock has the maximum number of waiters.
	ErrQueueFull = errors.New("dlock: too many waiters")
	// ErrLost means that the lease has expired, must be presumed expired, or was taken away.
	ErrLost = errors.New("dlock: lease lost")
	// ErrRequestLost is returned by Acquire when its place in the queue is gone or its grants arrived too late. Nothing was held;
	// acquire again.
	ErrRequestLost = errors.New("dlock: request lost")
	// ErrMaxHold means that a lease is no longer renewed because it was held for Options.Renew.MaxHold.
	ErrMaxHold = errors.New("dlock: held for the longest time allowed")
	// ErrReleased is the cause with which Release ends a handle's context.
	ErrReleased = errors.New("dlock: released")
	// ErrNotReentrant is returned by Acquire when its context already holds the key and the Locker isn't reentrant.
	ErrNotReentrant = errors.New("dlock: key is already held by this context; set Options.Reentrant or pass another context")
	// ErrInvalid is wrapped by errors about a key or option that cannot work. Nothing was locked.
	ErrInvalid = errors.New("dlock: invalid")
	// ErrClosed is returned by every call on a closed Locker or Backend.
	ErrClosed = errors.New("dlock: closed")
	// ErrForeignRelease is returned by a [Backend] that has released another owner's lock, which a correct one never does. It is
	// counted in release_by_non_owner_applied_total.
	ErrForeignRelease = errors.New("dlock: released a lock held by another owner")
)

// CheckKey returns an error that wraps [ErrInvalid] unless key is 1 to [MaxKeyLen] bytes of UTF-8 without control characters.
func CheckKey(key string) error {
	switch {
	case key == "":
		return fmt.Errorf("%w: key is empty", ErrInvalid)
	case len(key) > MaxKeyLen:
		return fmt.Errorf("%w: key has %d bytes, at most %d are allowed", ErrInvalid, len(key), MaxKeyLen)
	case !utf8.ValidString(key):
		return fmt.Errorf("%w: key is not valid UTF-8", ErrInvalid)
	}
	if strings.ContainsFunc(key, unicode.IsControl) {
		return fmt.Errorf("%w: key %q has a control character", ErrInvalid, key)
	}
	return nil
}
