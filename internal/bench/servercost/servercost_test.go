package servercost

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestMain(m *testing.M) { testmain.Run(m) }

const small = `{
	"seed": 1, "sample_every": "50ms", "limit": "1m",
	"redis": {"keys": 5000, "ttl": "200ms", "conns": 2, "batch": 64, "check": 20},
	"etcd": {"keys": 100, "leases": 20, "workers": 8, "lease_ttl": "2s", "quota": 67108864},
	"tokens": {"rounds": 2, "serial": 20, "parallel": 50, "clients": 4}
}`

func directory(t *testing.T, config string) string {
	t.Helper()
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600))
	return dir
}

func TestRecordWhereNothingCanBe(t *testing.T) {
	dir := directory(t, small)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "data.jsonl"), 0o700))
	var progress bytes.Buffer
	require.ErrorContains(t, Record(t.Context(), dir, &progress), "data.jsonl is a directory")
	require.Empty(t, progress.String(), "nothing has begun")
}

func TestRecord(t *testing.T) {
	dir := directory(t, small)
	var progress bytes.Buffer
	testbed.Need(t, Record(t.Context(), dir, &progress))
	for _, want := range []string{"redis active\n", "redis lazy\n", "etcd shared\n", "etcd leases\n", "tokens\n", "  reap "} {
		require.Contains(t, progress.String(), want)
	}
	b, err := os.ReadFile(filepath.Join(dir, "data.jsonl"))
	require.NoError(t, err)
	lines, err := Decode(bytes.NewReader(b))
	require.NoError(t, err)
	require.Equal(t, []string{"redis", "etcd", "3"}, firstWords(lines[0].Setup.Servers))
	samples, ping := 0, time.Duration(0)
	for _, l := range lines {
		if l.Kind == KindSample {
			samples++
		}
		if l.Kind == KindPhase && l.Redis != nil { // a short one may have no ping
			ping = max(ping, l.Redis.PingMax)
		}
	}
	require.Greater(t, samples, 4)
	require.Positive(t, ping)
	active, lazy := Phases(lines, "redis active"), Phases(lines, "redis lazy")
	require.EqualValues(t, 5000, active["fill"].Count)
	require.EqualValues(t, 5000, active["drain"].Redis.Keys, "a counter for each key")
	require.EqualValues(t, 5000, active["reap"].Count)
	require.EqualValues(t, 1, active["purge2"].Redis.Keys, "the floor")
	require.InDelta(t, active["use"].Values["greatest"]+1, active["reuse"].Values["greatest"], 0, "tokens go on after the reaping")
	require.EqualValues(t, 10000, lazy["expire"].Redis.Keys)
	require.EqualValues(t, 5000, lazy["expire"].Redis.Expires)
	require.InDelta(t, 20, lazy["touch"].Values["second_token"], 0, "expired locks are granted again")
	require.EqualValues(t, 4980, lazy["reclaim"].Count)
	shared, leases := Phases(lines, "etcd shared"), Phases(lines, "etcd leases")
	require.EqualValues(t, 100, shared["fill"].Etcd.Keys)
	require.EqualValues(t, 1, shared["fill"].Etcd.LeasesGranted)
	require.Zero(t, shared["release"].Etcd.Keys)
	require.Equal(t, shared["release"].Etcd.Revision, shared["defrag"].Etcd.Revision)
	require.EqualValues(t, 20, leases["fill"].Etcd.LeasesGranted)
	require.EqualValues(t, 20, leases["expire"].Etcd.LeasesRevoked)
}

func firstWords(all []string) (words []string) {
	for _, s := range all {
		word, _, _ := strings.Cut(s, " ")
		words = append(words, word)
	}
	return words
}

func TestNotRecorded(t *testing.T) {
	redis, err := testbed.StartRedis(t.Context(), nil)
	testbed.Need(t, err)
	require.NoError(t, redis.Close())
	dir := directory(t, `{"seed": 1, "sample_every": "10ms", "limit": "1ms",
		"redis": {"keys": 1000000, "ttl": "10s", "conns": 2, "batch": 64, "check": 20}}`)
	file := filepath.Join(dir, "data.jsonl")
	require.NoError(t, os.WriteFile(file, []byte("before"), 0o600))
	err = Record(t.Context(), dir, new(bytes.Buffer))
	require.ErrorContains(t, err, "redis active: fill: it took longer than 1ms, the limit")
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "before", string(b))

	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	require.ErrorIs(t, Record(ctx, dir, new(bytes.Buffer)), context.DeadlineExceeded)
}

func TestLoad(t *testing.T) {
	for config, want := range map[string]string{
		`{`: "config.json: unexpected EOF",
		`{"seed": 1, "sample_every": "1s", "limit": "1m", "rediss": {}}`: `unknown field "rediss"`,
		`{"seed": 1, "sample_every": "1", "limit": "1m", "redis": {}}`:   "missing unit",
		`{"seed": 1, "limit": "1m", "redis": {}}`:                        "sample_every and limit must be positive",
		`{"seed": 1, "sample_every": "1s", "limit": "1m"}`:               "there is nothing to do",
	} {
		_, err := Load(directory(t, config))
		require.ErrorContains(t, err, want)
	}
	for part, want := range map[string]string{
		`"redis": {"keys": 0}`:    "redis: keys, ttl, conns and batch must be positive",
		`"etcd": {"keys": 1}`:     "etcd: keys, leases, workers and quota must be positive",
		`"tokens": {"rounds": 0}`: "tokens: rounds, serial, parallel and clients must be positive",
	} {
		_, err := Load(directory(t, `{"seed": 1, "sample_every": "1s", "limit": "1m", `+part+`}`))
		require.ErrorContains(t, err, want)
	}
	_, err := Decode(strings.NewReader(`{"kind": 1}`))
	require.ErrorContains(t, err, "line 1")
}
