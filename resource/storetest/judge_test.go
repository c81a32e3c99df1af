package storetest

import (
	"context"
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

// TestJudge has answers that break a rule, and some that don't.
func TestJudge(t *testing.T) {
	accepted := func(f resource.Fence, begin, end int64) *call { return &call{fence: f, begin: begin, end: end} }
	refused := func(f, seen resource.Fence, begin, end int64) *call {
		return &call{fence: f, begin: begin, end: end, err: &resource.StaleTokenError{Key: key, Seen: seen, Got: f}}
	}
	for want, calls := range map[string][]*call{
		"":                                       {accepted(at(3, 1), 1, 4), accepted(at(1, 1), 2, 3), refused(at(2, 1), at(3, 1), 5, 6)},
		"Write at 3, the greatest: got":          {refused(at(3, 1), at(1, 1), 1, 2), accepted(at(1, 1), 3, 4)},
		"refused because of 1, which is less":    {accepted(at(1, 1), 1, 2), accepted(at(3, 1), 3, 4), refused(at(2, 1), at(1, 1), 5, 6)},
		"because of 2, which was not accepted":   {accepted(at(3, 1), 1, 2), refused(at(2, 1), at(3, 1), 3, 4), refused(at(1, 1), at(2, 1), 5, 6)},
		"because of 2.7, which was not accepted": {accepted(at(3, 1), 1, 2), refused(at(1, 1), at(2, 7), 3, 4)},
		"because of 3, which came later":         {refused(at(1, 1), at(3, 1), 1, 2), accepted(at(3, 1), 3, 4)},
		"accepted after Write at 3 was":          {accepted(at(3, 1), 1, 2), accepted(at(1, 1), 3, 4)},
		`ReadFenced by 2: got value "", want "1"`: {
			accepted(at(3, 1), 1, 6), accepted(at(1, 1), 2, 3), {fence: at(2, 0), begin: 4, end: 5, rec: resource.Record{MaxFence: at(2, 0)}},
		},
	} {
		err := failureOf(func() { judge(calls, at(3, 1)) })
		if want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, want)
	}
}

// reads is a store whose Reads return records, one after the other.
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
