package storetest

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/eachcall"
)

// The rules in the comment of resource.Store.
var rules = [...]string{
	1: "Write takes effect if and only if AdmitsWrite allows it, over the whole range of uint64. Otherwise it changes nothing " +
		"and returns a *StaleTokenError.",
	2: "A refused Write is reported as Applied if and only if its fence equals the greatest accepted and its value the stored one. " +
		"Since a fence is for one call, a caller whose reply was lost can repeat the call to find out whether it took effect.",
	3: "ReadFenced takes effect if and only if AdmitsRead allows it, and otherwise returns a *StaleTokenError. It raises the " +
		"fence to its own and reads atomically, so that a later write with a lower fence is refused.",
	4: "Of any number of concurrent calls on a key, accepted writes' fences strictly increase and the greatest wins.",
	5: "Keys are independent and may be anything that CheckKey admits. A value may be any bytes, including none, and is copied " +
		"in and out.",
	6: "A zero token, a zero sequence number and an invalid key are refused before anything is changed, but not with a " +
		"*StaleTokenError.",
	7: "A durable store acknowledges a call only once a crash can't undo it: value and fence survive reopening.",
	8: "A call whose ctx has ended before it starts changes nothing and returns ctx's cause.",
	9: "After Close every call returns ErrClosed. Close may be called again.",
	10: "A store that is a FenceSetter sets the fence of an existing key to (token, 0), even if that is lower, leaves its " +
		"value, and then keeps the rules above.",
	11: "A store that is an Overwriter sets the value whatever the fence, keeps the greatest fence offered, and then keeps the " +
		"rules above.",
}

var cases = []Case{
	{Name: "StrictlyGreater", Rule: rules[1], check: strictlyGreater},
	{Name: "EqualRefused", Rule: rules[1], check: equalRefused},
	{Name: "LowerRefused", Rule: rules[1], check: lowerRefused},
	{Name: "SeqOrders", Rule: rules[1], check: seqOrders},
	{Name: "FullRange", Rule: rules[1], check: fullRange},
	{Name: "RetryRecognised", Rule: rules[2], check: retryRecognised},
	{Name: "OtherValueRefused", Rule: rules[2], check: otherValueRefused},
	{Name: "RepeatTells", Rule: rules[2], check: repeatTells},
	{Name: "FencedReadRaises", Rule: rules[3], check: fencedReadRaises},
	{Name: "FencedReadRefused", Rule: rules[3], check: fencedReadRefused},
	{Name: "FencedReadOwnGrant", Rule: rules[3], check: fencedReadOwnGrant},
	{Name: "FencedReadSeq", Rule: rules[3], check: fencedReadSeq},
	{Name: "Concurrent", Rule: rules[4], check: concurrent},
	{Name: "KeysIndependent", Rule: rules[5], check: keysIndependent},
	{Name: "AnyKey", Rule: rules[5], check: anyKey},
	{Name: "AnyValue", Rule: rules[5], check: anyValue},
	{Name: "ValuesCopied", Rule: rules[5], check: valuesCopied},
	{Name: "ZeroTokenRefused", Rule: rules[6], check: zeroTokenRefused},
	{Name: "BadKeyRefused", Rule: rules[6], check: badKeyRefused},
	{Name: "Durable", Rule: rules[7], NeedsReopen: true, check: durable},
	{Name: "ContextEnded", Rule: rules[8], check: contextEnded},
	{Name: "Closed", Rule: rules[9], check: closed},
	{Name: "FenceSet", Rule: rules[10], check: fenceSet},
	{Name: "Overwrites", Rule: rules[11], check: overwrites},
}

const key = "k"

func strictlyGreater(ctx context.Context, s *store) {
	if _, err := s.Read(ctx, key); !errors.Is(err, resource.ErrNotFound) {
		fail("a new key: Read got %s, want %w", text(err), resource.ErrNotFound)
	}
	for _, f := range []resource.Fence{at(1, 1), at(2, 1), at(3, 1), at(1000, 1)} {
		s.writes(ctx, key, f)
		s.holds(ctx, key, written(f))
	}
}

func equalRefused(ctx context.Context, s *store) {
	s.writes(ctx, key, at(5, 1))
	for _, value := range []string{"another holder's", at(5, 1).String()} {
		err := s.Write(ctx, key, at(5, 1), []byte(value))
		if _, stale := errors.AsType[*resource.StaleTokenError](err); !stale {
			fail("second Write at 5: got %s, want a *StaleTokenError", text(err))
		}
		s.holds(ctx, key, written(at(5, 1)))
	}
}

func lowerRefused(ctx context.Context, s *store) {
	s.writes(ctx, key, at(2, 1), at(9, 1))
	for _, token := range []uint64{8, 2, 1, 3} {
		s.refused(ctx, key, at(token, 1), []byte("late"), false)
	}
	s.writes(ctx, key, at(10, 1))
}

func seqOrders(ctx context.Context, s *store) {
	s.writes(ctx, key, at(3, 1), at(3, 2), at(3, 5))
	s.refused(ctx, key, at(3, 4), []byte("late"), false)
	s.refused(ctx, key, at(2, 9), []byte("late"), false)
	s.writes(ctx, key, at(4, 1))
	s.refused(ctx, key, at(3, 6), []byte("late"), false)
}

func fullRange(ctx context.Context, s *store) {
	const top = math.MaxUint64
	ladder := []resource.Fence{
		at(1, 1), at(2, 1), at(1e9, 1), at(1e10, 1), at(1<<53, 1), at(1<<53+1, 1), at(1<<63-1, 1), at(1<<63, 1),
		at(top-1, top), at(top, 1), at(top, top-1), at(top, top),
	}
	for i, f := range ladder {
		s.writes(ctx, key, f)
		s.holds(ctx, key, written(f))
		for _, lower := range ladder[:i] {
			s.refused(ctx, key, lower, []byte("late"), false)
		}
	}
	s.reads(ctx, "read", at(top, 0))
	s.refused(ctx, "read", at(top-1, top), []byte("late"), false)
	s.writes(ctx, "read", at(top, 1))
}

func retryRecognised(ctx context.Context, s *store) {
	for _, f := range []resource.Fence{at(5, 1), at(5, 2), at(6, 1)} {
		s.writes(ctx, key, f)
		for range 2 {
			s.refused(ctx, key, f, valueOf(f), true)
		}
	}
	s.writesValue(ctx, "empty", at(1, 1), nil)
	s.refused(ctx, "empty", at(1, 1), nil, true)
}

func otherValueRefused(ctx context.Context, s *store) {
	f := at(12, 3)
	s.writes(ctx, key, f)
	for _, value := range []string{"another", "", "1", "12", "12.34", "12.3\x00", "12.4", "22.3", "99.9"} {
		s.refused(ctx, key, f, []byte(value), false)
	}
	for _, earlier := range []resource.Fence{at(11, 1), at(11, 3), at(12, 2)} {
		s.refused(ctx, key, earlier, valueOf(f), false)
	}
	// After a later fenced read, nobody can tell whether the write was accepted.
	s.reads(ctx, key, at(13, 0))
	s.refused(ctx, key, f, valueOf(f), false)
}

func repeatTells(ctx context.Context, s *store) {
	for _, applied := range []bool{true, false} {
		f := at(map[bool]uint64{true: 1, false: 2}[applied], 1)
		if applied {
			s.writes(ctx, key, f)
		}
		if err := s.Write(ctx, key, f, valueOf(f)); errors.Is(err, resource.ErrApplied) != applied || (err == nil) == applied {
			fail("repeated Write at %v, first one applied: %t: got %s", f, applied, text(err))
		}
		s.holds(ctx, key, written(f))
	}
	for token := uint64(3); token < 50; token++ {
		f := at(token, 1)
		givenUp, giveUp := context.WithCancel(ctx)
		go giveUp()
		first := s.Write(givenUp, key, f, valueOf(f))
		giveUp()
		if _, stale := errors.AsType[*resource.StaleTokenError](first); stale {
			fail("Write at %v with a ctx that ends: %w", f, first)
		}
		again := s.Write(ctx, key, f, valueOf(f))
		if !errors.Is(again, resource.ErrApplied) && (again != nil || first == nil) {
			fail("Write at %v: first got %s, then %s; want ErrApplied if the first took effect, else no error", f, text(first), text(again))
		}
		s.holds(ctx, key, written(f))
	}
}

func fencedReadRaises(ctx context.Context, s *store) {
	s.writes(ctx, key, at(1, 1))
	for key, value := range map[string][]byte{key: valueOf(at(1, 1)), "never written": nil} {
		want := resource.Record{Value: value, MaxFence: at(2, 0)}
		s.readsRecord(ctx, key, want)
		s.holds(ctx, key, want)
		s.refused(ctx, key, at(1, 2), []byte("late"), false)
		s.writes(ctx, key, at(2, 1))
	}
}

func fencedReadRefused(ctx context.Context, s *store) {
	s.writes(ctx, key, at(5, 1))
	s.readRefused(ctx, key, at(4, 0))
	s.writes(ctx, key, at(6, 1))
	s.reads(ctx, key, at(8, 0))
	s.readRefused(ctx, key, at(7, 0))
	s.readRefused(ctx, key, at(1, 0))
	s.writes(ctx, key, at(8, 1))
}

func fencedReadOwnGrant(ctx context.Context, s *store) {
	for _, f := range []resource.Fence{at(5, 1), at(5, 2), at(6, 1)} {
		s.writes(ctx, key, f)
		for range 2 {
			s.readsRecord(ctx, key, written(f))
			s.holds(ctx, key, written(f))
		}
	}
}

func fencedReadSeq(ctx context.Context, s *store) {
	s.writes(ctx, key, at(5, 1))
	for _, f := range []resource.Fence{at(5, 3), at(5, 3), at(5, 1<<63), at(6, 2)} { // a repeat is admitted
		want := resource.Record{Value: valueOf(at(5, 1)), MaxFence: f}
		if err := same(s.reads(ctx, key, f), want); err != nil {
			fail("ReadFenced by %v: %w", f, err)
		}
		s.holds(ctx, key, want)
		s.refused(ctx, key, at(f.Token, f.Seq-1), []byte("late"), false)
		s.refused(ctx, key, f, []byte("late"), false)
		s.readRefused(ctx, key, at(f.Token, f.Seq-1))
	}
	s.writes(ctx, key, at(6, 3))
	s.readRefused(ctx, key, at(6, 2))
	s.reads(ctx, "never written", at(1, 1))
	s.holds(ctx, "never written", resource.Record{MaxFence: at(1, 1)})
	s.writes(ctx, "never written", at(1, 2))
	s.readsRecord(ctx, key, written(at(6, 3))) // Seq 0: for the whole grant
}

func keysIndependent(ctx context.Context, s *store) {
	keys := []string{"a", "A", "b", "ab", "a/b", "a b"}
	for i, k := range keys {
		s.writes(ctx, k, at(uint64(100-i), 1)) // each lower than the last
	}
	s.reads(ctx, "c", at(1000, 0))
	for i, k := range keys {
		s.holds(ctx, k, written(at(uint64(100-i), 1)))
	}
}

func anyKey(ctx context.Context, s *store) {
	long := strings.Repeat("k", resource.MaxKeyLen-1)
	keys := []string{
		"a", "A", "b", "ab", "a b", "1", "01", "É", long + "l", long[1:] + "lk", long[:len(long)/2] + "l" + long[len(long)/2:],
		"/", "//", "a/", "/a", "a//b", "a/b", ".", "..", "../a", "a/..", "a/./b", "a/../b", "%", "%2F", "%2e%2e", "%zz",
		" ", " a", "a ", "a+b", "?", "a?b=c", "#", "&", ";", ":", "@", "\\", `"`, "'", "<", "*", "$", "{a}", "\u00a0",
		"\ufeff", "é", "e\u0301", "ключ", "🔒", "\u2028", long + "k", strings.Repeat("я", resource.MaxKeyLen/2),
	}
	for i, k := range keys {
		s.writes(ctx, k, at(uint64(i+1), 1))
	}
	for i, k := range keys {
		s.holds(ctx, k, written(at(uint64(i+1), 1)))
		s.reads(ctx, k, at(uint64(i+1), 0))
	}
}

func anyValue(ctx context.Context, s *store) {
	all := make([]byte, 1<<16)
	for i := range all {
		all[i] = byte(i)
	}
	for i, value := range []string{"", "\x00", "null", `{"value":""}`, "\xff\xfe", "a\r\n\r\nb", " ", string(all)} {
		want := resource.Record{Value: []byte(value), MaxFence: at(uint64(i+1), 1)}
		s.writesValue(ctx, key, want.MaxFence, want.Value)
		s.holds(ctx, key, want)
		s.readsRecord(ctx, key, want)
	}
}

func valuesCopied(ctx context.Context, s *store) {
	want := written(at(1, 1))
	mine := valueOf(at(1, 1))
	s.writesValue(ctx, key, at(1, 1), mine)
	mine[0] = 'X'
	s.holds(ctx, key, want)
	s.record(ctx, key).Value[0] = 'Y'
	s.holds(ctx, key, want)
	want.MaxFence = at(2, 0)
	for range 2 {
		s.reads(ctx, key, at(2, 0)).Value[0] = 'Z'
		s.holds(ctx, key, want)
	}
}

func zeroTokenRefused(ctx context.Context, s *store) {
	for _, f := range []resource.Fence{at(0, 0), at(0, 1), at(1, 0)} {
		s.invalid(ctx, fmt.Sprintf("Write at (%d, %d)", f.Token, f.Seq), key, s.Write(ctx, key, f, []byte("v")))
	}
	for _, f := range []resource.Fence{at(0, 0), at(0, 1)} {
		_, err := s.ReadFenced(ctx, key, f)
		s.invalid(ctx, fmt.Sprintf("ReadFenced by (%d, %d)", f.Token, f.Seq), key, err)
	}
	s.writes(ctx, key, at(1, 1))
}

func badKeyRefused(ctx context.Context, s *store) {
	for _, k := range []string{"", strings.Repeat("k", resource.MaxKeyLen+1), "\xff", "a\x00b", "a\nb", "\x7f", "\u0085"} {
		s.invalid(ctx, fmt.Sprintf("Write of key %.40q", k), "", s.Write(ctx, k, at(1, 1), []byte("v")))
		if _, err := s.Read(ctx, k); err == nil || errors.Is(err, resource.ErrNotFound) {
			fail("key %.40q: Read got %s, want an error about the key", k, text(err))
		}
		_, err := s.ReadFenced(ctx, k, at(1, 0))
		s.invalid(ctx, fmt.Sprintf("ReadFenced of key %.40q", k), "", err)
	}
}

// invalid checks that err refuses an invalid call, and that key, if given, still doesn't exist.
func (s *store) invalid(ctx context.Context, call, key string, err error) {
	if err == nil {
		fail("%s: it was accepted", call)
	}
	if _, stale := errors.AsType[*resource.StaleTokenError](err); stale || errors.Is(err, resource.ErrNotFound) {
		fail("%s: got %w, want an error about the argument", call, err)
	}
	if key == "" {
		return
	}
	if _, err := s.Read(ctx, key); !errors.Is(err, resource.ErrNotFound) {
		fail("%s: afterwards Read got %s, want %w", call, text(err), resource.ErrNotFound)
	}
}

func durable(ctx context.Context, s *store) {
	s.writes(ctx, key, at(5, 1), at(5, 2))
	s.writesValue(ctx, "empty", at(4, 1), nil)
	s.reads(ctx, "only read", at(7, 0))
	s.reads(ctx, "numbered", at(7, 3))
	s.reads(ctx, "empty", at(7, 0))
	for range 2 {
		s.reopen()
		s.holds(ctx, "numbered", resource.Record{MaxFence: at(7, 3)})
		s.refused(ctx, "numbered", at(7, 3), []byte("late"), false)
		s.readRefused(ctx, "numbered", at(7, 2))
		s.holds(ctx, key, written(at(5, 2)))
		s.holds(ctx, "empty", resource.Record{Value: []byte{}, MaxFence: at(7, 0)})
		s.holds(ctx, "only read", resource.Record{MaxFence: at(7, 0)})
		s.refused(ctx, key, at(5, 1), []byte("late"), false)
		s.refused(ctx, key, at(5, 2), valueOf(at(5, 2)), true)
		s.refused(ctx, "only read", at(6, 1), []byte("late"), false)
		s.readRefused(ctx, "only read", at(6, 0))
	}
	s.writes(ctx, key, at(5, 3))
}

func contextEnded(ctx context.Context, s *store) {
	s.writes(ctx, key, at(1, 1))
	cause := errors.New("the cause")
	ended, end := context.WithCancelCause(ctx)
	end(cause)
	s.everyCallFails(ended, "with a ctx that has ended", cause)
	s.holds(ctx, key, written(at(1, 1)))
}

// closed closes the store; Check closes it again.
func closed(ctx context.Context, s *store) {
	s.writes(ctx, key, at(1, 1))
	if err := s.Close(); err != nil {
		fail("Close: %w", err)
	}
	s.everyCallFails(ctx, "after Close", resource.ErrClosed)
}

func (s *store) everyCallFails(ctx context.Context, when string, want error) {
	for name, call := range eachcall.Of(s.Store, key, at(2, 1)) {
		if err := call(ctx); !errors.Is(err, want) {
			fail("%s: %s: got %s, want an error that wraps %w", when, name, text(err), want)
		}
	}
}

func fenceSet(ctx context.Context, s *store) {
	setter, ok := s.Store.(resource.FenceSetter)
	if !ok {
		return
	}
	top := at(math.MaxUint64, math.MaxUint64)
	s.writes(ctx, key, top)
	s.reads(ctx, "only read", at(top.Token, 0))
	for key, value := range map[string][]byte{key: valueOf(top), "only read": nil} {
		for _, token := range []uint64{7, 9, 6} { // back, on, and back again
			if err := setter.SetFence(ctx, key, token); err != nil {
				fail("SetFence of %q to %d: %w", key, token, err)
			}
			s.holds(ctx, key, resource.Record{Value: value, MaxFence: at(token, 0)})
			s.refused(ctx, key, at(token-1, 1), []byte("late"), false)
			s.readRefused(ctx, key, at(token-1, 0))
		}
		s.writes(ctx, key, at(6, 1))
		if err := setter.SetFence(ctx, key, 6); err != nil { // seq goes back
			fail("SetFence of %q to its own token: %w", key, err)
		}
		s.holds(ctx, key, resource.Record{Value: valueOf(at(6, 1)), MaxFence: at(6, 0)})
		s.writes(ctx, key, at(6, 1))
	}
	if err := setter.SetFence(ctx, "new", 1); !errors.Is(err, resource.ErrNotFound) {
		fail("SetFence of a new key: got %s, want %w", text(err), resource.ErrNotFound)
	}
	s.invalid(ctx, "SetFence to 0", "", setter.SetFence(ctx, key, 0)) // the key must exist, else ErrNotFound would pass
	s.holds(ctx, key, written(at(6, 1)))
}

func overwrites(ctx context.Context, s *store) {
	over, ok := s.Store.(resource.Overwriter)
	if !ok {
		return
	}
	for _, c := range []struct{ offered, keeps resource.Fence }{
		{resource.Fence{}, resource.Fence{}}, {at(1, 1), at(1, 1)}, {at(5, 2), at(5, 2)}, {at(5, 1), at(5, 2)}, {at(3, 9), at(5, 2)}, {resource.Fence{}, at(5, 2)},
	} {
		if err := over.Overwrite(ctx, key, c.offered, valueOf(c.offered)); err != nil {
			fail("Overwrite at %v: %w", c.offered, err)
		}
		s.holds(ctx, key, resource.Record{Value: valueOf(c.offered), MaxFence: c.keeps})
	}
	s.refused(ctx, key, at(5, 2), []byte("another"), false)
	s.writes(ctx, key, at(5, 3))
	for _, f := range []resource.Fence{at(0, 1), at(1, 0)} {
		s.invalid(ctx, fmt.Sprintf("Overwrite at (%d, %d)", f.Token, f.Seq), "new", over.Overwrite(ctx, "new", f, nil))
	}
	if setter, ok := s.Store.(resource.FenceSetter); ok { // a key with a value exists, even without a fence
		if err := errors.Join(over.Overwrite(ctx, "unfenced", resource.Fence{}, []byte("v")), setter.SetFence(ctx, "unfenced", 7)); err != nil {
			fail("Overwrite without a fence, then SetFence: %w", err)
		}
		s.holds(ctx, "unfenced", resource.Record{Value: []byte("v"), MaxFence: at(7, 0)})
	}
	s.invalid(ctx, `Overwrite of key ""`, "", over.Overwrite(ctx, "", resource.Fence{}, nil))
}
