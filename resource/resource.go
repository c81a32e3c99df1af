// Package resource enforces fencing: a [Store] refuses a write unless its [Fence] is greater than every fence it has accepted. So
// a lock holder that was paused for longer than its TTL can't write after its successor (Kleppmann, "How to do distributed
// locking", 2016).
package resource

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxKeyLen is the length of the longest valid key, in bytes.
const MaxKeyLen = 512

var (
	// ErrNotFound is returned for a key that has neither been written nor read with a fence.
	ErrNotFound = errors.New("resource: key not found")
	// ErrClosed is returned by calls on a closed [Store].
	ErrClosed = errors.New("resource: store is closed")
	// ErrUnfenced is wrapped by a [Client]'s error if the server didn't check the token. The call may have taken effect.
	ErrUnfenced = errors.New("resource: the fencing token was not enforced")
	// ErrTooLarge is wrapped by the error of a write whose value exceeds a limit. Nothing was written.
	ErrTooLarge = errors.New("resource: value is too large")
	// ErrNoRoom is wrapped by the error of a call on a full [Store]. Nothing was changed, unless the client library has repeated a fenced
	// read whose first reply was lost: that may have raised the fence.
	ErrNoRoom = errors.New("resource: the store has no room")
	// ErrApplied is matched by a [*StaleTokenError] whose write has the greatest fence accepted and the value stored: since a
	// [Fence] is for one call, that write was accepted. If the lock may grant a token twice, put an idempotency key into the
	// value, so that two holders' writes differ.
	ErrApplied = errors.New("resource: this write is already applied")
)

// Fence orders calls by Token, which comes from the lock's grant, and then by Seq, which counts the grant's calls from 1. Use a
// pair for one call only; repeating that call is fine. A fenced read may have Seq 0: it comes after all calls of earlier grants,
// in no order with calls of its own grant.
type Fence struct {
	Token uint64
	Seq   uint64
}

// NewFence makes a Fence of what a lock's handle returns: NewFence(handle.Next()).
func NewFence(token, seq uint64) Fence { return Fence{Token: token, Seq: seq} }

// Compare compares f and g like [cmp.Compare].
func (f Fence) Compare(g Fence) int {
	return cmp.Or(cmp.Compare(f.Token, g.Token), cmp.Compare(f.Seq, g.Seq))
}

// Max returns the greater of f and g.
func (f Fence) Max(g Fence) Fence {
	if f.Compare(g) < 0 {
		return g
	}
	return f
}

// String returns "7.2", or "7" if Seq is 1.
func (f Fence) String() string {
	if f.Seq == 1 {
		return strconv.FormatUint(f.Token, 10)
	}
	return fmt.Sprintf("%d.%d", f.Token, f.Seq)
}

// ParseFence parses the form of [Fence.String].
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

// AdmitsWrite is the fencing rule for writes: got must be greater than everything seen. redisstore, pgstore and dynamostore
// repeat it on their servers; so do the judge and the model, which must not share its mistakes.
func AdmitsWrite(seen, got Fence) bool { return got.Compare(seen) > 0 }

// AdmitsRead is the fencing rule for reads: got must not be less than anything seen. With Seq 0 a grant may read until a later
// grant touches the key.
func AdmitsRead(seen, got Fence) bool {
	return got.Compare(seen) >= 0 || got.Token == seen.Token && got.Seq == 0
}

// Record is what a [Store] holds for a key. Value is nil only if the key was never written.
type Record struct {
	Value    []byte
	MaxFence Fence // the greatest accepted
}

// CheckWrite returns nil or a [*StaleTokenError], by rules 1 and 2 of [Store].
func (r Record) CheckWrite(key string, f Fence, value []byte) error {
	if AdmitsWrite(r.MaxFence, f) {
		return nil
	}
	applied := f == r.MaxFence && r.Value != nil && bytes.Equal(value, r.Value)
	return &StaleTokenError{Key: key, Seen: r.MaxFence, Got: f, Applied: applied}
}

// CheckRead returns nil or a [*StaleTokenError], by rule 3 of [Store].
func (r Record) CheckRead(key string, f Fence) error {
	if AdmitsRead(r.MaxFence, f) {
		return nil
	}
	return &StaleTokenError{Key: key, Seen: r.MaxFence, Got: f}
}

// Store holds a value and the greatest accepted fence for each key. Its methods may be called concurrently. An implementation
// must keep these rules, which the cases in brackets of package storetest check:
//
//  1. Write takes effect if and only if [AdmitsWrite] allows it, over the whole range of uint64. Otherwise it changes nothing
//     and returns a [*StaleTokenError]. [StrictlyGreater, EqualRefused, LowerRefused, SeqOrders, FullRange]
//  2. A refused Write is reported as Applied if and only if its fence equals the greatest accepted and its value the stored one.
//     Since a fence is for one call, a caller whose reply was lost can repeat the call to find out whether it took effect.
//     [RetryRecognised, OtherValueRefused, RepeatTells]
//  3. ReadFenced takes effect if and only if [AdmitsRead] allows it, and otherwise returns a [*StaleTokenError]. It raises the
//     fence to its own and reads atomically, so that a later write with a lower fence is refused.
//     [FencedReadRaises, FencedReadRefused, FencedReadOwnGrant, FencedReadSeq]
//  4. Of any number of concurrent calls on a key, accepted writes' fences strictly increase and the greatest wins. [Concurrent]
//  5. Keys are independent and may be anything that [CheckKey] admits. A value may be any bytes, including none, and is copied in
//     and out. [KeysIndependent, AnyKey, AnyValue, ValuesCopied]
//  6. A zero token, a zero sequence number and an invalid key are refused before anything is changed, but not with a
//     [*StaleTokenError]. [ZeroTokenRefused, BadKeyRefused]
//  7. A durable store acknowledges a call only once a crash can't undo it: value and fence survive reopening. [Durable]
//  8. A call whose ctx has ended before it starts changes nothing and returns ctx's cause. [ContextEnded]
//  9. After Close every call returns [ErrClosed]. Close may be called again. [Closed]
//  10. A store that is a [FenceSetter] sets the fence of an existing key to (token, 0), even if that is lower, leaves its
//     value, and then keeps the rules above. [FenceSet]
//  11. A store that is an [Overwriter] sets the value whatever the fence, keeps the greatest fence offered, and then keeps the
//     rules above. [Overwrites]
type Store interface {
	// Write sets key's value if f is greater than every fence accepted for key. f.Token and f.Seq must be at least 1. After an
	// error other than [*StaleTokenError], [ErrTooLarge], [ErrNoRoom] and [ErrJump] the write may have taken effect: repeat the
	// call before a later fence is accepted to find out (rule 2; see also [ErrApplied]).
	Write(ctx context.Context, key string, f Fence, value []byte) error
	// Read returns key's record, or [ErrNotFound]. To write a value computed from it, use ReadFenced instead.
	Read(ctx context.Context, key string) (Record, error)
	// ReadFenced atomically raises key's fence to f and returns the record. f.Token must be at least 1; f.Seq may be 0. A new key
	// has a nil Value, which is no error.
	ReadFenced(ctx context.Context, key string, f Fence) (Record, error)
	// Close waits for calls in flight, then releases the store's resources. A call that ended with its ctx may still take effect.
	Close() error
}

// FenceSetter is a [Store] whose fences an operator can lower after a wrong token has locked a key. Stop the key's holders first.
type FenceSetter interface {
	Store
	// SetFence sets key's fence to (token, 0), token at least 1. For a new key it returns [ErrNotFound].
	SetFence(ctx context.Context, key string, token uint64) error
}

// Overwriter is a [Store] that can also write without checking the fence, for experiments.
type Overwriter interface {
	Store
	// Overwrite sets key's value whatever f is; zero means none. MaxFence becomes the greatest fence offered.
	Overwrite(ctx context.Context, key string, f Fence, value []byte) error
}

// StaleTokenError means that a call was refused because of its fence and changed nothing, unless a client library repeated a
// fenced read whose first attempt raised the fence.
type StaleTokenError struct {
	Key     string
	Seen    Fence // the greatest fence accepted
	Got     Fence // the fence of the refused call
	Applied bool  // the refused write has the fence and the value that the store has accepted last, see [ErrApplied]
}

func (e *StaleTokenError) Error() string {
	s := fmt.Sprintf("resource: stale fencing token for %q: seen %d, got %d", e.Key, e.Seen.Token, e.Got.Token)
	if e.Seen.Token == e.Got.Token { // one grant
		s = fmt.Sprintf("resource: stale fence for %q: seen %v, got %v", e.Key, e.Seen, e.Got)
	}
	const most = 1<<53 - 1 // the greatest token of locks that limit theirs
	switch {
	case e.Applied:
		s += " (already applied)"
	case e.Seen.Token > most && e.Got.Token <= most:
		s += fmt.Sprintf(": if no lock has granted %d, stop all holders and lower the fence: fencelab fence set -force STORE-URL '%s' %d, "+
			"or for cmd/resource, with the server stopped: resource -file FILE -set-fence '%[2]s=%[3]d'",
			e.Seen.Token, strings.ReplaceAll(e.Key, "'", `'\''`), e.Got.Token)
	case e.Seen == e.Got: // not a read, which would be admitted
		s += ": another call used this token and Seq, and each call needs its own; if it wasn't of this grant, two holders have the same " +
			"token, since the lock service has lost data"
	}
	return s
}

// Is matches [ErrApplied] if e.Applied.
func (e *StaleTokenError) Is(target error) bool { return target == ErrApplied && e.Applied }

// CheckKey returns an error unless key is 1 to [MaxKeyLen] bytes of UTF-8 without control characters.
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

// CheckToken returns an error if token is 0.
func CheckToken(token uint64) error {
	if token == 0 {
		return errors.New("resource: fencing token is 0; tokens start at 1")
	}
	return nil
}

// CheckFence returns an error if f.Token or f.Seq is 0.
func CheckFence(f Fence) error {
	if f.Seq == 0 {
		return cmp.Or(CheckToken(f.Token), errors.New("resource: sequence number is 0; a grant's first write is 1"))
	}
	return CheckToken(f.Token)
}

// CheckOffered is [CheckFence], but admits the zero fence.
func CheckOffered(f Fence) error {
	if f == (Fence{}) {
		return nil
	}
	return CheckFence(f)
}

// CheckContext returns ctx's cause, wrapped, if ctx has ended.
func CheckContext(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	return fmt.Errorf("resource: %w", context.Cause(ctx))
}
