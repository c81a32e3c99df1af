package scenarios_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func overRedis(t *testing.T, name string, f history.Fencing, onEvent func(s *stores.Store, key string, e history.Event)) *scenarios.Outcome {
	t.Helper()
	s := hazard(t, name)
	over := open.OnServer(stores.Redis, storeServer(t, stores.Redis))
	client, err := stores.Open(t.Context(), over.Addr, stores.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close()) }()
	var key string
	r := scenarios.Runner{Service: sharedServers(t, locks.Redis).On(), Store: over, OnEvent: func(e history.Event) {
		if e.Kind == history.KindReport && e.Name == history.Acquired {
			key = e.Key
		}
		onEvent(client, key, e)
	}}
	o, err := r.Run(t.Context(), s, f)
	require.NoError(t, err)
	return o
}

func is(e history.Event, actorOrTarget, name string) bool {
	return e.Name == name && (e.Kind == history.KindReport && e.Actor == actorOrTarget || e.Kind == history.KindFault && e.Target == actorOrTarget)
}

// An effect that no worker reports is a decision.
func TestStoreIsWatched(t *testing.T) {
	write := func(f resource.Fence, value string) func(*testing.T, *stores.Store, string) {
		return func(t *testing.T, s *stores.Store, key string) {
			t.Helper()
			if f == (resource.Fence{}) {
				require.NoError(t, s.WriteUnfenced(t.Context(), key, []byte(value)))
				return
			}
			require.NoError(t, s.Write(t.Context(), key, f, []byte(value)))
		}
	}
	last := resource.Fence{Token: 1 << 60, Seq: 1}
	for name, c := range map[string]struct {
		fencing history.Fencing
		actor   string
		at      string
		do      func(t *testing.T, s *stores.Store, key string)
		verdict history.Verdict
		finding string
	}{
		"a stale write that takes effect though it was reported as refused": {
			history.FencingOn, "A", history.BeforeWrite, write(resource.Fence{}, "A\n"),
			history.Violated, "a write without a token was accepted, with fencing on",
		},
		"a write by nobody": {
			history.FencingOn, "B", history.Done, write(resource.Fence{}, "B\nX\n"),
			history.Violated, "a write without a token was accepted, with fencing on",
		},
		"a fence that nobody was granted": {
			history.FencingOn, "B", history.Done, write(last, "B\nX\n"),
			history.Inconclusive, "the resource decided about token 1152921504606846976, which nobody was granted",
		},
		"an entry that goes": {
			history.FencingOn, "B", history.Done, write(resource.Fence{}, ""),
			history.Violated, "entry B was accepted and is lost",
		},
		"a write that has no effect": {
			history.FencingOff, "B", history.Wrote, write(resource.Fence{}, ""),
			history.Violated, "entry B was accepted and is lost",
		},
		"a record that goes": {
			history.FencingOn, "B", history.Done,
			func(t *testing.T, _ *stores.Store, key string) {
				t.Helper()
				c, err := redisclient.New(storeServer(t, stores.Redis).URL)
				require.NoError(t, err)
				require.NoError(t, c.Del(t.Context(), "resource:{"+key+"}").Err())
				require.NoError(t, c.Close())
			},
			history.Violated, "the resource forgot a fence",
		},
	} {
		t.Run(name, func(t *testing.T) {
			o := overRedis(t, "PauseExceedsTTL", c.fencing, func(s *stores.Store, key string, e history.Event) {
				if is(e, c.actor, c.at) {
					c.do(t, s, key)
				}
			})
			require.Equal(t, c.verdict, o.Verdict, strings.Join(history.Trace(o.Events), "\n"))
			require.True(t, slices.ContainsFunc(o.Findings, func(f string) bool { return strings.Contains(f, c.finding) }), "%q", o.Findings)
		})
	}
}

func TestStoreAgainstWorker(t *testing.T) {
	const key, ledger = "k", "A\n"
	at := resource.Fence{Token: 7, Seq: 1}
	write := func(s *resource.Memory) error { return s.Write(t.Context(), key, at, []byte(ledger)) }
	overwrite := func(s *resource.Memory) error { return s.Overwrite(t.Context(), key, resource.Fence{}, []byte(ledger)) }
	raise := func(s *resource.Memory) error {
		_, err := s.ReadFenced(t.Context(), key, resource.Fence{Token: at.Token})
		return err
	}
	nothing := func(*resource.Memory) error { return nil }
	for name, c := range map[string]struct {
		fencing  history.Fencing
		do       func(*resource.Memory) error
		report   string
		accepted bool
		enforced bool
		op       string
	}{
		"reported accepted, was":            {history.FencingOn, write, history.Wrote, true, true, "write"},
		"reported accepted, was not":        {history.FencingOn, nothing, history.Wrote, false, true, "write"},
		"reported refused, was accepted":    {history.FencingOn, write, history.WriteStale, true, true, "write"},
		"reported refused, was":             {history.FencingWrites, nothing, history.WriteStale, false, true, "write"},
		"unfenced, reported accepted, was":  {history.FencingOff, overwrite, history.Wrote, true, false, "write"},
		"unfenced, and nothing is":          {history.FencingOff, nothing, history.Wrote, false, false, "write"},
		"a fenced read that raised":         {history.FencingOn, raise, history.Read, true, true, "read"},
		"a fenced read that raised nothing": {history.FencingOn, nothing, history.Read, false, true, "read"},
		"refused, and it raised":            {history.FencingOn, raise, history.ReadStale, true, true, "read"},
		"a read that isn't fenced":          {history.FencingWrites, nothing, history.Read, true, false, "read"},
	} {
		t.Run(name, func(t *testing.T) {
			store := resource.NewMemory()
			var decisions []history.Event
			sync := scenarios.Watch(c.fencing, store, key, func(e history.Event) { decisions = append(decisions, e) })
			before := history.Event{Kind: history.KindReport, Actor: "A", Name: history.BeforeWrite, Token: 7, Value: ledger}
			require.NoError(t, sync(t.Context(), &before))
			require.Empty(t, decisions)
			require.NoError(t, c.do(store))
			require.NoError(t, sync(t.Context(), &history.Event{Kind: history.KindReport, Actor: "A", Name: c.report, Token: 7, Value: ledger}))
			require.Len(t, decisions, 1)
			got := decisions[0]
			require.Equal(t, []any{c.op, c.accepted, c.enforced}, []any{got.Op, got.Accepted, got.Enforced})
			if c.op == "write" {
				require.Equal(t, ledger, got.Value)
			}
			require.NoError(t, sync(t.Context(), nil))
			require.Len(t, decisions, 1, "once")
		})
	}
}

// The crash may undo what no event has shown yet.
func TestDecisionsBeforeAKill(t *testing.T) {
	store := resource.NewMemory()
	var told []history.Event
	kill := scenarios.KillOf(store, "k", func(e history.Event) { told = append(told, e) })
	require.NoError(t, store.Write(t.Context(), "k", resource.Fence{Token: 7, Seq: 1}, nil))
	require.NoError(t, kill(t.Context()))
	require.Len(t, told, 1)
	require.Equal(t, uint64(7), told[0].Token)
}

func TestStoreThatForgets(t *testing.T) {
	redis, _ := ownRedis(t, options(t)) // keeps nothing on disk
	s := hazard(t, "ResourceCrash")
	for _, f := range []history.Fencing{history.FencingWrites, history.FencingOn} {
		r := scenarios.Runner{Service: sharedServers(t, locks.Redis).On(), Store: open.OnServer(stores.Redis, redis)}
		out, err := r.Run(t.Context(), s, f)
		testbed.Need(t, err)
		require.Equal(t, history.Violated, out.Verdict, strings.Join(history.Trace(out.Events), "\n"))
		require.Contains(t, strings.Join(out.Findings, "; "), "the resource forgot a fence")
		require.NotContains(t, strings.Join(out.Findings, "; "), "without a token", "what the crash undid is no write")
		require.Equal(t, []string{"B"}, out.Lost)
		require.Equal(t, 1, out.Stale, "the stale write was accepted")
	}
}

// An effect that isn't the reported call's is a decision of its own.
func TestStoreAgainstOthers(t *testing.T) {
	const key = "k"
	store, ctx := resource.NewMemory(), t.Context()
	var decisions []string
	sync := scenarios.Watch(history.FencingOn, store, key, func(e history.Event) { decisions = append(decisions, fmt.Sprint(e.Op, " ", e.Token, " ", e.Accepted)) })
	overwrite := func(value string) error { return store.Overwrite(ctx, key, resource.Fence{}, []byte(value)) }
	for _, c := range []struct {
		do     func() error
		report string
		token  uint64
		want   []string
	}{
		{func() error { _, err := store.ReadFenced(ctx, key, resource.Fence{Token: 8}); return err }, history.Read, 8, []string{"read 8 true"}},
		{func() error { return nil }, history.ReadStale, 7, []string{"read 7 false"}},
		{func() error { return overwrite("") }, "", 0, []string{"write 0 true"}},
		{func() error { return overwrite("A\n") }, history.Wrote, 8, []string{"write 0 true", "write 8 false"}},
		{func() error { return store.Write(ctx, key, resource.Fence{Token: 9, Seq: 1}, []byte("A\n")) }, history.Wrote, 9, []string{"write 9 true"}},
		{func() error { return store.Write(ctx, key, resource.Fence{Token: 10, Seq: 2}, []byte("A\n")) }, history.Wrote, 10, []string{"write 10 true", "write 10 false"}},
	} {
		decisions = nil
		require.NoError(t, c.do())
		require.NoError(t, sync(ctx, &history.Event{Kind: history.KindReport, Actor: "A", Name: c.report, Token: c.token}))
		require.Equal(t, c.want, decisions)
	}
}
