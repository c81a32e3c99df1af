package observe_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/observe"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/storetest"
)

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }

func TestStore(t *testing.T) {
	storetest.Run(t, storetest.Harness{New: func() (resource.Store, error) {
		return observe.Store(resource.NewMemory(), func(observe.Decision) {}), nil
	}})
}

func TestDecisions(t *testing.T) {
	var told []string
	s := observe.Store(resource.NewMemory(), func(d observe.Decision) {
		told = append(told, fmt.Sprintf("%s %s at %v, seen %v, accepted %t, enforced %t: %q", d.Op, d.Key, d.Fence, d.Seen, d.Accepted, d.Enforced, d.Value))
	})
	ctx := t.Context()
	read := func(token uint64) { _, _ = s.ReadFenced(ctx, "k", resource.Fence{Token: token}) }
	_, _ = s.Read(ctx, "k")
	read(4)
	_ = s.Write(ctx, "k", at(5), []byte("a"))
	_ = s.Write(ctx, "k", at(4), []byte("b"))
	read(4)
	read(6)
	_ = s.Overwrite(ctx, "k", at(3), []byte("c"))
	_, _ = s.Read(ctx, "k")
	_ = s.Write(ctx, "k", at(0), nil)
	require.Equal(t, []string{
		`read k at 0.0, seen 0.0, accepted true, enforced false: ""`,
		`read k at 4.0, seen 0.0, accepted true, enforced true: ""`,
		`write k at 5, seen 4.0, accepted true, enforced true: "a"`,
		`write k at 4, seen 5, accepted false, enforced true: "b"`,
		`read k at 4.0, seen 5, accepted false, enforced true: ""`,
		`read k at 6.0, seen 5, accepted true, enforced true: "a"`,
		`write k at 3, seen 6.0, accepted true, enforced false: "c"`,
		`read k at 0.0, seen 6.0, accepted true, enforced false: "c"`,
	}, told)
}

type wrong struct {
	resource.Store
	write func(ctx context.Context, key string, f resource.Fence, value []byte) error
}

func (w wrong) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return w.write(ctx, key, f, value)
}

// Only the first attempt of a write is accepted.
func TestStoreRetries(t *testing.T) {
	m := resource.NewMemory()
	var told []string
	s := observe.Store(wrong{m, func(ctx context.Context, key string, f resource.Fence, value []byte) error {
		_ = m.Write(ctx, key, f, value)
		return m.Write(ctx, key, f, value)
	}}, func(d observe.Decision) {
		told = append(told, fmt.Sprintf("%v, seen %v, accepted %t", d.Fence, d.Seen, d.Accepted))
	})
	for _, c := range []struct {
		token    uint64
		value    string
		accepted bool
	}{{5, "a", true}, {5, "a", false}, {5, "b", false}, {4, "a", false}, {6, "a", true}} {
		err := s.Write(t.Context(), "k", at(c.token), []byte(c.value))
		require.Equal(t, c.accepted, err == nil, "%s at %d", c.value, c.token)
	}
	require.Equal(t, []string{
		"5, seen 0.0, accepted true", "5, seen 5, accepted false", "5, seen 5, accepted false", "4, seen 5, accepted false",
		"6, seen 5, accepted true",
	}, told)
}

func TestUnknownOutcome(t *testing.T) {
	failed := errors.New("disk on fire")
	s := observe.Store(wrong{resource.NewMemory(), func(context.Context, string, resource.Fence, []byte) error { return failed }},
		func(d observe.Decision) { t.Error(d) })
	require.ErrorIs(t, s.Write(t.Context(), "k", at(5), nil), failed)
	require.ErrorIs(t, s.Overwrite(t.Context(), "k", at(5), nil), errors.ErrUnsupported)
}

// The write takes effect, so it must be reported.
func TestCallerGone(t *testing.T) {
	m := resource.NewMemory()
	ctx, leave := context.WithCancel(t.Context())
	told := 0
	s := observe.Store(wrong{m, func(ctx context.Context, key string, f resource.Fence, value []byte) error {
		leave()
		return m.Write(ctx, key, f, value)
	}}, func(d observe.Decision) {
		require.True(t, d.Accepted)
		told++
	})
	require.NoError(t, s.Write(ctx, "k", at(5), nil))
	require.ErrorIs(t, s.Write(ctx, "k", at(6), nil), context.Canceled)
	require.Equal(t, 1, told)
}

func TestOrder(t *testing.T) {
	var mu sync.Mutex
	told := map[string][]observe.Decision{}
	s := observe.Store(resource.NewMemory(), func(d observe.Decision) {
		mu.Lock()
		defer mu.Unlock()
		d.Value = bytes.Clone(d.Value)
		told[d.Key] = append(told[d.Key], d)
	})
	const writers = 50
	var wg sync.WaitGroup
	for i := range 2 * writers {
		wg.Go(func() {
			_ = s.Write(t.Context(), "key"+strconv.Itoa(i%2), resource.Fence{Token: uint64(1 + i*37%writers), Seq: uint64(1 + i/writers)}, nil)
		})
	}
	wg.Wait()
	for key, decisions := range told {
		require.Len(t, decisions, writers)
		var seen resource.Fence
		for i, d := range decisions {
			require.Equal(t, seen, d.Seen, "%s, decision %d", key, i)
			require.Equal(t, resource.AdmitsWrite(seen, d.Fence), d.Accepted, "%s, decision %d", key, i)
			seen = seen.Max(d.Fence)
		}
	}
}
