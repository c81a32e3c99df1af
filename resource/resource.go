// Package resource is where fencing happens: a store that refuses a write whose fencing token is not greater than
// every token it has accepted; writes under one token are in order of a number of their own, see [Fence].
//
// A lock with a TTL is a hint. Its holder may be frozen, cut off or slow for longer than the TTL and write after its
// successor. Only the resource can tell, and only by the token (Kleppmann, "How to do distributed locking", 2016).
// This package trusts the token alone; it knows nothing of locks.
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

// MaxKeyLen is the longest key in bytes that [CheckKey] lets pass.
const MaxKeyLen = 512

var (
	// ErrNotFound is returned by [Store.Read] for a key that no write or fenced read has touched.
	ErrNotFound = errors.New("resource: key not found")
	// ErrClosed is returned by every call on a closed [Store].
	ErrClosed = errors.New("resource: store is closed")
	// ErrUnfenced is wrapped by a [Client]'s error about a call whose token the resource has not looked at. The call may
	// have taken effect, unprotected.
	ErrUnfenced = errors.New("resource: the fencing token was not enforced")
	// ErrTooLarge is wrapped by the error of a write whose value is larger than the [Store] takes. Nothing was written.
	ErrTooLarge = errors.New("resource: value is too large")
	// ErrNoRoom is wrapped by the error of a call that the [Store] has no room for, because its disk is full for example.
	// Nothing was changed, and a repeat is of use only once there is room.
	ErrNoRoom = errors.New("resource: the store has no room")
	// ErrApplied is matched by a [*StaleTokenError] whose write is a repeat of the last accepted one: same token, same
	// sequence number, same value. The caller's write took effect; its first answer was lost. The fence alone doesn't tell:
	// a lock service that has lost data may hand out a token twice, and the second holder is told the same if its value is
	// that of the first. So put into the value what tells writers apart, an idempotency key for example.
	ErrApplied = errors.New("resource: this write is already applied")
)

// Fence orders writes. Token comes from the lock's grant and only grows; Seq counts the writes under one grant, from 1.
// A fenced read stands at Seq 0: after every write of earlier grants and before every write of its own.
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

// ParseFence reads what [Fence.String] writes. Numbers are decimal digits only: no sign, no space, at most
// [math.MaxUint64].
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

// AdmitsWrite is the fencing rule for writes: got must be strictly greater than everything seen.
// Strictly, because two holders that were handed the same token must not both write.
func AdmitsWrite(seen, got Fence) bool { return got.Compare(seen) > 0 }

// AdmitsRead is the fencing rule for reads: a grant may read as long as no later grant has touched the key.
func AdmitsRead(seen, got Fence) bool { return got.Token >= seen.Token }

// Record is what a [Store] holds for a key. A key that only fenced reads have touched has a nil Value; one that holds
// an empty value has a Value that is empty and not nil.
type Record struct {
	Value    []byte
	MaxFence Fence // the greatest fence accepted so far
}

// CheckWrite is nil if r admits a write of value at f, else a [*StaleTokenError]. It is rules 1 and 2 of [Store], for
// implementations that hold the record in memory while they decide.
func (r Record) CheckWrite(key string, f Fence, value []byte) error {
	if AdmitsWrite(r.MaxFence, f) {
		return nil
	}
	applied := f == r.MaxFence && r.Value != nil && bytes.Equal(value, r.Value)
	return &StaleTokenError{Key: key, Seen: r.MaxFence, Got: f, Applied: applied}
}

// CheckRead is nil if r admits a fenced read by token, else a [*StaleTokenError]: rule 3 of [Store].
func (r Record) CheckRead(key string, token uint64) error {
	f := Fence{Token: token}
	if AdmitsRead(r.MaxFence, f) {
		return nil
	}
	return &StaleTokenError{Key: key, Seen: r.MaxFence, Got: f}
}

// Store is a set of keys, each with a value and the greatest fence accepted. Check and effect are one atomic step.
//
// An implementation must keep these rules; package storetest checks each under the names in brackets:
//
//  1. Write takes effect exactly if [AdmitsWrite] says so, over the whole range of uint64; otherwise it changes nothing
//     and returns a [*StaleTokenError]. [StrictlyGreater, EqualRefused, LowerRefused, SeqOrders, FullRange]
//  2. A refused Write that repeats the accepted one (equal fence, equal value) is reported as Applied, and no other is,
//     so that a caller whose answer was lost learns by repeating the call whether it took effect.
//     [RetryRecognised, OtherValueRefused, RepeatTells]
//  3. ReadFenced raises the fence to (token, 0) in the same step as it reads, so that a write of an earlier grant that
//     arrives later is refused; it returns a [*StaleTokenError] if a later grant has touched the key, and leaves the
//     fence alone if its own grant has. [FencedReadRaises, FencedReadRefused, FencedReadOwnGrant]
//  4. Of any number of concurrent calls on a key, accepted fences strictly increase and the greatest wins. [Concurrent]
//  5. Keys are independent and may be anything that [CheckKey] lets pass; a value is any bytes, none included, and is
//     copied in and out. [KeysIndependent, AnyKey, AnyValue, ValuesCopied]
//  6. A zero token, a zero sequence number and an invalid key are refused before anything is changed, and not with a
//     [*StaleTokenError]. [ZeroTokenRefused, BadKeyRefused]
//  7. A durable store answers only what a crash cannot undo: value and fence survive reopening. [Durable]
//  8. A call whose ctx has ended before it starts changes nothing and returns ctx's cause. [ContextEnded]
//  9. After Close every call returns [ErrClosed]; Close may be called again. [Closed]
//  10. A store that is a [FenceSetter] sets the fence of a key that exists to (token, 0), back too, leaves its value, and then
//     goes by the rules above. [FenceSet]
type Store interface {
	// Write sets key's value if f is greater than every fence accepted for key.
	// f.Token and f.Seq must be at least 1. It returns nil, a [*StaleTokenError], an error that wraps [ErrTooLarge] or [ErrNoRoom], or
	// one that leaves open whether the write took effect; a repeat of the call tells (rule 2), unless a later fence has
	// come in between, or another holder of the same token has written the same value, see [ErrApplied].
	Write(ctx context.Context, key string, f Fence, value []byte) error
	// Read returns key's record, or [ErrNotFound]. It isn't fenced: what it returns may be overwritten by an
	// earlier grant's late write before the caller writes. A holder that will write what it computes from the
	// value must use ReadFenced.
	Read(ctx context.Context, key string) (Record, error)
	// ReadFenced returns key's record as of the moment at which it raised key's fence to (token, 0); the record's
	// MaxFence is the raised one. A key never touched before has a nil Value and is no error.
	ReadFenced(ctx context.Context, key string, token uint64) (Record, error)
	// Close releases what the store holds. Calls in flight finish first.
	Close() error
}

// Overwriter is a [Store] that can also write without looking at the fence: the unsafe baseline, which exists to
// show what happens without fencing.
type Overwriter interface {
	Store
	// Overwrite sets key's value whatever f is. f may be zero, the fence of a caller that has none; MaxFence becomes
	// the greatest fence offered.
	Overwrite(ctx context.Context, key string, f Fence, value []byte) error
}

// FenceSetter is a [Store] whose fences an operator can set, back too: after a token that was wrong has locked a key. Stop
// the key's holders first, for one with a greater token than the new fence gets through again.
type FenceSetter interface {
	Store
	// SetFence sets the fence of a key that exists to (token, 0), and leaves its value. The token must be at least 1.
	SetFence(ctx context.Context, key string, token uint64) error
}

// StaleTokenError tells that a call's fence was not greater than what the resource had seen. Nothing was changed.
type StaleTokenError struct {
	Key  string
	Seen Fence // the greatest fence accepted
	Got  Fence // the fence of the refused call
	// Applied tells that the refused write is a repeat of the accepted one: same fence, same value. See [ErrApplied].
	Applied bool
}

func (e *StaleTokenError) Error() string {
	s := fmt.Sprintf("resource: stale fencing token for %q: seen %d, got %d", e.Key, e.Seen.Token, e.Got.Token)
	if e.Seen.Token == e.Got.Token { // one grant: its sequence numbers tell
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

// Is makes errors.Is(err, ErrApplied) true for a recognised repeat.
func (e *StaleTokenError) Is(target error) bool { return target == ErrApplied && e.Applied }

// CheckKey returns an error that says what is wrong with key, or nil: a key is 1 to [MaxKeyLen] bytes of UTF-8
// without control characters.
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

// CheckToken returns an error that says what is wrong with a fenced read's token, or nil.
func CheckToken(token uint64) error {
	if token == 0 {
		return errors.New("resource: fencing token is 0; tokens start at 1")
	}
	return nil
}

// CheckFence returns an error that says what is wrong with a write's fence, or nil.
func CheckFence(f Fence) error {
	if f.Seq == 0 {
		return cmp.Or(CheckToken(f.Token), errors.New("resource: sequence number is 0; a grant's first write is 1"))
	}
	return CheckToken(f.Token)
}

// CheckOffered is [CheckFence] for an [Overwriter], which takes the zero fence for a caller that has none.
func CheckOffered(f Fence) error {
	if f == (Fence{}) {
		return nil
	}
	return CheckFence(f)
}

// CheckContext returns ctx's cause, wrapped, if ctx has ended, or nil.
func CheckContext(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("resource: %w", context.Cause(ctx))
}

// Decision is one answer of a resource, in the order in which they took effect.
type Decision struct {
	Op       Op
	Key      string
	Fence    Fence // what the caller offered; zero for an unfenced read
	Seen     Fence // the greatest fence accepted for Key before this call
	Accepted bool
	Enforced bool   // false: the fence was not looked at (the unsafe baseline, or an unfenced read)
	Value    []byte // what was read or offered, nil for a refused read; not to be kept or changed
}

// Op is what a [Decision] is about.
type Op string

// The operations of a resource.
const (
	OpRead  Op = "read"
	OpWrite Op = "write"
)
