// Package resource enforces fencing: a [Store] refuses a write whose fencing token is not greater than every token that it
// has accepted. A sequence number orders the writes under one token, see [Fence].
//
// A lock with a TTL is only a hint: its holder may be paused, cut off or slow for longer than the TTL, and write after its
// successor. Only the resource can detect that, and only by the token (Kleppmann, "How to do distributed locking", 2016).
// This package trusts the token alone and knows nothing of locks.
package resource

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxKeyLen is the length of the longest valid key, in bytes.
const MaxKeyLen = 512

var (
	// ErrNotFound is returned by [Store.Read] for a key that was neither written nor read with a fence.
	ErrNotFound = errors.New("resource: key not found")
	// ErrClosed is returned by every call on a closed [Store].
	ErrClosed = errors.New("resource: store is closed")
	// ErrUnfenced is wrapped by the error of a [Client]'s call whose token the resource did not check. The call may have
	// taken effect, unprotected.
	ErrUnfenced = errors.New("resource: the fencing token was not enforced")
	// ErrTooLarge is wrapped by the error of a write whose value exceeds the [Store]'s limit. Nothing was written.
	ErrTooLarge = errors.New("resource: value is too large")
	// ErrNoRoom is wrapped by the error of a call for which the [Store] has no room, because its disk is full for example.
	// Nothing was changed. A retry fails until there is room.
	ErrNoRoom = errors.New("resource: the store has no room")
	// ErrApplied is matched by a [*StaleTokenError] whose write repeats the last accepted one: same token, same sequence
	// number, same value. The write took effect; its first reply was lost. The fence alone can't tell, because a lock service
	// that has lost data may grant a token twice. A second holder that writes the same value is told the same, so put
	// something into the value that differs between writers, such as an idempotency key.
	ErrApplied = errors.New("resource: this write is already applied")
)

// Fence orders writes. Token comes from the lock's grant and only grows. Seq counts the writes under one grant, from 1.
// A fenced read has Seq 0: it comes after every write of earlier grants and before every write of its own.
type Fence struct {
	Token uint64
	Seq   uint64
}

// Compare returns -1, 0 or +1 as f is before, at or after g; Token decides, then Seq.
func (f Fence) Compare(g Fence) int {
	return cmp.Or(cmp.Compare(f.Token, g.Token), cmp.Compare(f.Seq, g.Seq))
}

// Max returns the later of f and g.
func (f Fence) Max(g Fence) Fence {
	if f.Compare(g) < 0 {
		return g
	}
	return f
}

// String is the token, followed by the sequence number where it isn't 1: "7", "7.0", "7.2".
func (f Fence) String() string {
	if f.Seq == 1 {
		return strconv.FormatUint(f.Token, 10)
	}
	return fmt.Sprintf("%d.%d", f.Token, f.Seq)
}

// ParseFence parses what [Fence.String] writes. Numbers have decimal digits only and are at most [math.MaxUint64].
func ParseFence(s string) (Fence, error) {
	token, seq, found := strings.Cut(s, ".")
	if !found {
		seq = "1"
	}
	t, errToken := strconv.ParseUint(token, 10, 64)
	n, errSeq := strconv.ParseUint(seq, 10, 64)
	if err := cmp.Or(errToken, errSeq); err != nil {
		return Fence{}, fmt.Errorf("resource: fence %.50q is not of the form TOKEN or TOKEN.SEQ: %w", s, err)
	}
	return Fence{Token: t, Seq: n}, nil
}

// AdmitsWrite is the fencing rule for writes: got must be strictly greater than everything seen, so that of two holders
// with the same token only one can write.
func AdmitsWrite(seen, got Fence) bool { return got.Compare(seen) > 0 }

// AdmitsRead is the fencing rule for reads: a grant may read as long as no later grant has touched the key.
func AdmitsRead(seen, got Fence) bool { return got.Token >= seen.Token }

// Record is what a [Store] holds for a key. Value is nil if only fenced reads have touched the key; an empty value that
// was written is empty and not nil.
type Record struct {
	Value    []byte
	MaxFence Fence // the greatest fence accepted so far
}

// CheckWrite returns nil if r admits a write of value at f, else a [*StaleTokenError]: rules 1 and 2 of [Store], for
// stores that decide in memory.
func (r Record) CheckWrite(key string, f Fence, value []byte) error {
	if AdmitsWrite(r.MaxFence, f) {
		return nil
	}
	applied := f == r.MaxFence && r.Value != nil && bytes.Equal(value, r.Value)
	return &StaleTokenError{Key: key, Seen: r.MaxFence, Got: f, Applied: applied}
}

// CheckRead returns nil if r admits a fenced read by token, else a [*StaleTokenError]: rule 3 of [Store].
func (r Record) CheckRead(key string, token uint64) error {
	f := Fence{Token: token}
	if AdmitsRead(r.MaxFence, f) {
		return nil
	}
	return &StaleTokenError{Key: key, Seen: r.MaxFence, Got: f}
}

// Store holds a value and the greatest accepted fence for each key. It checks and acts atomically.
//
// An implementation must keep these rules. Package storetest has the cases in brackets for each:
//
//  1. Write takes effect if and only if [AdmitsWrite] says so, over the whole range of uint64. Otherwise it changes nothing
//     and returns a [*StaleTokenError]. [StrictlyGreater, EqualRefused, LowerRefused, SeqOrders, FullRange]
//  2. A refused Write that repeats the accepted one (equal fence, equal value) is reported as Applied, and no other is,
//     so that a caller whose reply was lost can repeat the call to find out whether it took effect.
//     [RetryRecognised, OtherValueRefused, RepeatTells]
//  3. ReadFenced raises the fence to (token, 0) and reads atomically, so that a later write of an earlier grant is refused.
//     It returns a [*StaleTokenError] if a later grant has touched the key, and leaves the fence alone if its own grant
//     has. [FencedReadRaises, FencedReadRefused, FencedReadOwnGrant]
//  4. Of any number of concurrent calls on a key, accepted fences strictly increase and the greatest wins. [Concurrent]
//  5. Keys are independent and may be anything that [CheckKey] admits. A value is any bytes, none included, and is copied
//     in and out. [KeysIndependent, AnyKey, AnyValue, ValuesCopied]
//  6. A zero token, a zero sequence number and an invalid key are refused before anything is changed, but not with a
//     [*StaleTokenError]. [ZeroTokenRefused, BadKeyRefused]
//  7. A durable store replies only what a crash cannot undo: value and fence survive reopening. [Durable]
//  8. A call whose ctx has ended before it starts changes nothing and returns ctx's cause. [ContextEnded]
//  9. After Close every call returns [ErrClosed]. Close may be called again. [Closed]
//  10. A store that is a [FenceSetter] sets the fence of an existing key to (token, 0), even if that is lower, leaves its
//     value, and then keeps the rules above. [FenceSet]
//  11. A store that is an [Overwriter] sets the value whatever the fence, keeps the greatest fence offered, and then keeps the
//     rules above. [Overwrites]
type Store interface {
	// Write sets key's value if f is greater than every fence accepted for key. f.Token and f.Seq must be at least 1.
	// It returns nil, a [*StaleTokenError], or an error that wraps [ErrTooLarge] or [ErrNoRoom]. After any other error the
	// write may have taken effect: repeat the call to find out (rule 2). The repeat can't tell if a later fence has come in
	// between, or if another holder of the same token has written the same value, see [ErrApplied].
	Write(ctx context.Context, key string, f Fence, value []byte) error
	// Read returns key's record, or [ErrNotFound]. It is not fenced: an earlier grant may still change the value before the
	// caller writes. A holder that writes what it computes from the value must use ReadFenced.
	Read(ctx context.Context, key string) (Record, error)
	// ReadFenced raises key's fence to (token, 0) and atomically returns the record, with the raised fence. For a key never
	// touched before, Value is nil and there is no error.
	ReadFenced(ctx context.Context, key string, token uint64) (Record, error)
	// Close waits for calls in flight, and then releases what the store holds.
	Close() error
}

// FenceSetter is a [Store] whose fences an operator can set, lower too, after a wrong token has locked a key. Stop the
// key's holders first: one whose token is greater than the new fence can write again.
type FenceSetter interface {
	Store
	// SetFence sets the fence of an existing key to (token, 0) and leaves its value. The token must be at least 1. It returns
	// [ErrNotFound] for a key that doesn't exist.
	SetFence(ctx context.Context, key string, token uint64) error
}

// Overwriter is a [Store] that can also write without checking the fence. It is for experiments that show what happens
// without fencing (package scenarios, [HandlerOptions].Unfenced); production code has no use for it.
type Overwriter interface {
	Store
	// Overwrite sets key's value whatever f is; zero is the fence of a caller that has none. MaxFence becomes the greatest
	// fence offered.
	Overwrite(ctx context.Context, key string, f Fence, value []byte) error
}

// StaleTokenError means that a call's fence was not greater than the greatest accepted one. Nothing was changed.
type StaleTokenError struct {
	Key  string
	Seen Fence // the greatest fence accepted
	Got  Fence // the fence of the refused call
	// Applied means that the refused write repeats the accepted one: same fence, same value. See [ErrApplied].
	Applied bool
}

func (e *StaleTokenError) Error() string {
	s := fmt.Sprintf("resource: stale fencing token for %q: seen %d, got %d", e.Key, e.Seen.Token, e.Got.Token)
	if e.Seen.Token == e.Got.Token { // one grant: show the sequence numbers
		s = fmt.Sprintf("resource: stale write for %q: seen %v, got %v", e.Key, e.Seen, e.Got)
	}
	switch {
	case e.Applied:
		s += " (already applied)"
	case e.Seen.Token == e.Got.Token && e.Seen.Seq < math.MaxUint64:
		s += fmt.Sprintf(": a further write under this token takes Seq %d", e.Seen.Seq+1)
	}
	return s
}

// Is makes errors.Is(err, ErrApplied) true if e.Applied.
func (e *StaleTokenError) Is(target error) bool { return target == ErrApplied && e.Applied }

// CheckKey returns an error unless key is valid: 1 to [MaxKeyLen] bytes of UTF-8 without control characters.
func CheckKey(key string) error {
	switch {
	case key == "":
		return errors.New("resource: key is empty")
	case len(key) > MaxKeyLen:
		return fmt.Errorf("resource: key has %d bytes, at most %d are allowed", len(key), MaxKeyLen)
	case !utf8.ValidString(key):
		return errors.New("resource: key is not valid UTF-8")
	}
	if strings.ContainsFunc(key, unicode.IsControl) {
		return fmt.Errorf("resource: key %q has a control character", key)
	}
	return nil
}

// CheckToken returns an error unless token is valid for a fenced read: at least 1.
func CheckToken(token uint64) error {
	if token == 0 {
		return errors.New("resource: fencing token is 0; tokens start at 1")
	}
	return nil
}

// CheckFence returns an error unless f is valid for a write: token and sequence number are at least 1.
func CheckFence(f Fence) error {
	if f.Seq == 0 {
		return cmp.Or(CheckToken(f.Token), errors.New("resource: sequence number is 0; a grant's first write is 1"))
	}
	return CheckToken(f.Token)
}

// CheckOffered is [CheckFence] for an [Overwriter], which also takes the zero fence.
func CheckOffered(f Fence) error {
	if f == (Fence{}) {
		return nil
	}
	return CheckFence(f)
}

// CheckContext returns ctx's cause, wrapped, if ctx has ended, else nil.
func CheckContext(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("resource: %w", context.Cause(ctx))
}
