package storetest

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
)

func failureOf(f func()) (err error) {
	defer func() {
		if f, ok := recover().(failure); ok {
			err = f.error
		}
	}()
	f()
	return nil
}

func TestJudge(t *testing.T) {
	call := func(f resource.Fence, err error, begin, end int64) *Call {
		return &Call{Fence: f, Value: valueOf(f), Err: err, Begin: begin, End: end}
	}
	accepted := func(f resource.Fence, begin, end int64) *Call { return call(f, nil, begin, end) }
	refused := func(f, seen resource.Fence, begin, end int64) *Call {
		return call(f, &resource.StaleTokenError{Key: key, Seen: seen, Got: f, Applied: f == seen && f.Seq > 0}, begin, end)
	}
	unknown := func(f resource.Fence, begin, end int64) *Call { return call(f, errors.New("no answer"), begin, end) }
	read := func(token uint64, value resource.Fence, begin, end int64) *Call {
		c := accepted(at(token, 0), begin, end)
		if c.Record.MaxFence = c.Fence.Max(value); value.Token > 0 {
			c.Record.Value = valueOf(value)
		}
		return c
	}
	same := func(value string, calls ...*Call) []*Call {
		for _, c := range calls {
			if c.Value = []byte(value); c.Record.Value != nil {
				c.Record.Value = c.Value
			}
		}
		return calls
	}
	wrong := read(3, at(1, 1), 3, 4)
	wrong.Record.MaxFence.Seq = 5
	for _, c := range []struct {
		want  string
		calls []*Call
	}{
		{"got fence 3.5, want 3.0", []*Call{accepted(at(1, 1), 1, 2), wrong}},
		{"", []*Call{accepted(at(3, 1), 1, 4), accepted(at(1, 1), 2, 3), refused(at(2, 1), at(3, 1), 5, 6)}},
		{"", []*Call{accepted(at(1, 1), 1, 2), read(1, at(1, 1), 3, 4), refused(at(1, 1), at(1, 1), 5, 6)}},
		{"refused because of 1, which is less", []*Call{accepted(at(1, 1), 1, 2), refused(at(2, 1), at(1, 1), 5, 6)}},
		{"refused because of 2.0, which is less", []*Call{read(2, at(0, 0), 1, 2), refused(at(2, 0), at(2, 0), 5, 6)}},
		{"because of 2, which was not accepted", []*Call{accepted(at(3, 1), 1, 3), refused(at(2, 1), at(3, 1), 4, 5), refused(at(1, 1), at(2, 1), 2, 6)}},
		{"because of 2.7, which was not accepted", []*Call{accepted(at(3, 1), 1, 3), refused(at(1, 1), at(2, 7), 2, 4)}},
		{"because of 1, after Write at 3 had shown 3", []*Call{accepted(at(1, 1), 1, 2), accepted(at(3, 1), 3, 4), refused(at(1, 1), at(1, 1), 5, 6)}},
		{"because of 3, which came later", []*Call{refused(at(1, 1), at(3, 1), 1, 2), accepted(at(3, 1), 3, 4)}},
		{"Applied:false", []*Call{accepted(at(1, 1), 1, 2), call(at(1, 1), &resource.StaleTokenError{Seen: at(1, 1), Got: at(1, 1)}, 3, 4)}},
		{"accepted after Write at 3 was", []*Call{accepted(at(3, 1), 1, 2), accepted(at(1, 1), 3, 4)}},
		{"accepted after Write at 1 was", []*Call{refused(at(1, 1), at(3, 1), 2, 3), accepted(at(2, 1), 4, 5), unknown(at(3, 1), 1, 6)}},
		{"accepted twice", []*Call{accepted(at(1, 1), 1, 2), accepted(at(1, 1), 3, 4)}},
		{"", []*Call{accepted(at(1, 1), 1, 3), accepted(at(1, 1), 2, 4)}},
		{`got "" at 2.0, but there was a write at 1`, []*Call{accepted(at(1, 1), 2, 3), read(2, at(0, 0), 4, 5)}},
		{`got "1" at 3.0, but there was a write at 2`, []*Call{accepted(at(1, 1), 1, 2), accepted(at(2, 1), 3, 4), read(3, at(1, 1), 5, 6)}},
		{`got "" at 1.0, but there was a write at 1`, []*Call{accepted(at(1, 1), 1, 2), read(1, at(0, 0), 3, 4)}},
		{`got value "2", want ""`, []*Call{read(3, at(2, 1), 1, 2), accepted(at(2, 1), 3, 4)}},

		// Calls without an answer may take effect at any time, or not at all.
		{"", []*Call{refused(at(2, 0), at(3, 1), 1, 6), refused(at(1, 1), at(2, 0), 2, 3), accepted(at(3, 1), 4, 5)}},
		{"", []*Call{refused(at(1, 1), at(1, 1), 1, 2)}},
		{"", []*Call{read(1, at(0, 0), 1, 2), accepted(at(2, 1), 3, 4)}},
		{"", append(same("", refused(at(2, 1), at(3, 0), 5, 6)), accepted(at(1, 1), 1, 2), read(3, at(1, 1), 3, 4), read(4, at(1, 1), 7, 8))},
		{"", same("x", accepted(at(1, 1), 1, 2), read(3, at(1, 1), 3, 4), refused(at(2, 1), at(3, 0), 5, 6), read(4, at(1, 1), 7, 8))},
		{"", []*Call{unknown(at(1, 1), 1, 2), read(2, at(1, 1), 3, 4)}},
		{"", []*Call{unknown(at(1, 1), 1, 2), read(2, at(0, 0), 3, 4)}},
		{"", []*Call{unknown(at(2, 1), 1, 2), accepted(at(1, 1), 3, 4), refused(at(1, 1), at(2, 1), 5, 6), read(3, at(2, 1), 7, 8)}},
		{"", []*Call{unknown(at(1, 1), 1, 2), refused(at(1, 1), at(1, 1), 3, 4), read(2, at(1, 1), 5, 6)}},
		{`got "" at 3.0, but there was a write at 1`, []*Call{unknown(at(1, 1), 1, 2), read(2, at(1, 1), 3, 4), read(3, at(0, 0), 5, 6)}},
		{`got "" at 3.0, but there was a write at 2`, []*Call{read(3, at(0, 0), 1, 2), unknown(at(2, 1), 3, 4), read(3, at(2, 1), 5, 6)}},
		{"accepted after ReadFenced by 2 was", []*Call{unknown(at(2, 2), 1, 2), read(2, at(2, 2), 3, 4), accepted(at(2, 1), 5, 6)}},
		{"but there was a write at 1", []*Call{unknown(at(1, 1), 1, 2), refused(at(1, 1), at(1, 1), 3, 4), read(2, at(0, 0), 5, 6)}},
	} {
		if err := Judge(c.calls); c.want != "" {
			require.ErrorContains(t, err, c.want, c.calls)
		} else {
			require.NoError(t, err, c.calls)
		}
	}
}

type reads struct {
	resource.Store
	records []resource.Record
}

func (r *reads) Read(context.Context, string) (rec resource.Record, err error) {
	rec, r.records = r.records[0], r.records[1:]
	return rec, nil
}

func TestWatch(t *testing.T) {
	for want, records := range map[string][]resource.Record{
		"got fence 1 after 2":          {written(at(2, 1)), written(at(1, 1))},
		`got value "1.2" with fence 1`: {{Value: valueOf(at(1, 2)), MaxFence: at(1, 1)}},
		"got fence 1 after 2.0":        {{Value: valueOf(at(1, 1)), MaxFence: at(2, 0)}, written(at(1, 1))},
	} {
		require.ErrorContains(t, failureOf(func() { watch(t.Context(), &store{Store: &reads{records: records}}) }), want)
	}
}
