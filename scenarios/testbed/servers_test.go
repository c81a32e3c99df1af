package testbed_test

import (
	"cmp"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

type life struct {
	start   func(ctx context.Context, o *testbed.Options) (*testbed.Server, error)
	version string   // a pattern; default: numbers
	bad     []string // arguments with which it exits,
	says    string   // and a pattern of its log then
}

var lives = map[string]life{
	"redis":     {start: testbed.StartRedis, bad: []string{"--no-such-directive", "1"}, says: "no-such-directive"},
	"etcd":      {start: one(testbed.StartEtcd), bad: []string{"--no-such-flag"}, says: "no-such-flag"},
	"zookeeper": {start: one(testbed.StartZooKeeper), bad: []string{"tickTime=none"}, says: "NumberFormatException"},
	"consul":    {start: testbed.StartConsul, bad: []string{"-no-such-flag"}, says: "no-such-flag"},
	"postgres":  {start: testbed.StartPostgres, bad: []string{"-c", "no_such_setting=1"}, says: "no_such_setting"},
	// A container's log may be cut before the rest.
	"s3":       {start: testbed.StartS3, version: `^VERSITYGW$`, bad: []string{"--no-such-flag"}, says: `no-such-flag|\$VGW_`},
	"dynamodb": {start: testbed.StartDynamoDB, version: `\S`},
}

func one(start func(context.Context, int, *testbed.Options) (*testbed.Cluster, error)) func(context.Context, *testbed.Options) (*testbed.Server, error) {
	return func(ctx context.Context, o *testbed.Options) (*testbed.Server, error) {
		c, err := start(ctx, 1, o)
		if err != nil {
			return nil, err
		}
		return c.Servers[0], nil
	}
}

// Freezing, killing, restarting and wiping are covered by TestPause, TestRestart, the hazards and the tests of locks and stores.
func TestServers(t *testing.T) {
	for name, l := range lives {
		t.Run(name, func(t *testing.T) {
			onProviders(t, name, func(t *testing.T, p testbed.Provider) { l.require(t, p, "FENCELAB_"+strings.ToUpper(name)+"_ADDR") })
		})
	}
}

func (l life) require(t *testing.T, p testbed.Provider, env string) {
	t.Helper()
	ctx := t.Context()
	if l.bad != nil {
		_, err := l.start(ctx, &testbed.Options{Provider: p, Args: l.bad})
		require.ErrorContains(t, err, "exit")
		require.Regexp(t, l.says, err.Error(), "the end of its log is in the error")
	}
	s, err := l.start(ctx, &testbed.Options{Provider: p})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	require.Equal(t, p, s.Provider)
	require.Regexp(t, cmp.Or(l.version, `^\d+\.\d+(\.\d+)?$`), s.Version)
	require.True(t, strings.HasSuffix(s.String(), " "+s.Version+" ("+string(p)+")"), s.String())

	external := &testbed.Options{Provider: testbed.External}
	for _, set := range []string{s.Addr, s.URL, "127.0.0.1:1"} {
		if set == s.URL && env == "FENCELAB_ETCD_ADDR" || set == s.URL && env == "FENCELAB_CONSUL_ADDR" {
			continue // host:port only
		}
		t.Setenv(env, set)
		users, err := l.start(ctx, external)
		if set == "127.0.0.1:1" {
			require.ErrorContains(t, err, "the server at 127.0.0.1:1 ("+env+") does not answer")
			continue
		}
		require.NoError(t, err)
		require.Equal(t, []string{s.Addr, s.URL, s.Version, "external"}, []string{users.Addr, users.URL, users.Version, string(users.Provider)})
		require.NoError(t, users.Close())
		require.True(t, listens(t, s.Addr), "it is the user's")
	}
	require.NoError(t, s.Close())
	requireGone(t, s.Addr)
	require.NoError(t, s.Close(), "Close again")
}

func TestExternalAddress(t *testing.T) {
	t.Setenv(testbed.EnvProvider, "external")
	for name, all := range map[string][]string{
		"redis":    {"http://:hunter2@localhost", "redis://:hunter2@local host", "redis://:hunter2@localhost/no-number", "redis://"},
		"postgres": {"http://:hunter2@localhost", "postgres://:hunter2@local host", "postgres:///postgres"},
		"s3":       {"ftp://id:hunter2@localhost", "http://id:hunter2@host:port", "http://id:hunter2@localhost/bucket"},
	} {
		env := "FENCELAB_" + strings.ToUpper(name) + "_ADDR"
		for _, set := range all {
			t.Setenv(env, set)
			_, err := lives[name].start(t.Context(), nil)
			require.ErrorContains(t, err, env+" must be host:port or a URL (", set)
			require.NotContains(t, err.Error(), "hunter2")
		}
		t.Setenv(env, "")
		_, err := lives[name].start(t.Context(), nil)
		require.ErrorContains(t, err, env+" is not set: set it to host:port or a URL (")
	}
	t.Setenv("FENCELAB_ETCD_ADDR", "http://127.0.0.1:1")
	_, err := lives["etcd"].start(t.Context(), nil)
	require.ErrorContains(t, err, "FENCELAB_ETCD_ADDR must be host:port")
	t.Setenv("FENCELAB_ZOOKEEPER_ADDR", " 127.0.0.1:1")
	_, err = testbed.StartZooKeeper(t.Context(), 3, nil)
	require.ErrorContains(t, err, "FENCELAB_ZOOKEEPER_ADDR names 1 of 3 servers; separate them by commas")
	for _, set := range []string{"http://id:hunter2@localhost:1/", "https://id:hunter2@127.0.0.1:1"} {
		t.Setenv("FENCELAB_S3_ADDR", set)
		_, err = testbed.StartS3(t.Context(), nil)
		require.ErrorContains(t, err, "does not answer")
		require.NotContains(t, err.Error(), "hunter2")
	}
}

func TestExternalCredentials(t *testing.T) {
	users := startRedis(t, &testbed.Options{Provider: testbed.Local})
	require.NoError(t, dialRedis(t, users.Addr).ConfigSet(t.Context(), "requirepass", "hunter2").Err())
	external := &testbed.Options{Provider: testbed.External}
	t.Setenv(testbed.EnvRedisAddr, "redis://:hunter2@"+users.Addr+"/0")
	s, err := testbed.StartRedis(t.Context(), external)
	require.NoError(t, err)
	require.Equal(t, users.Addr, s.Addr)
	c, err := redisclient.New(s.URL)
	require.NoError(t, err)
	require.NoError(t, errors.Join(c.Ping(t.Context()).Err(), c.Close()))
	require.NoError(t, s.Close())
	t.Setenv(testbed.EnvRedisAddr, users.Addr)
	_, err = testbed.StartRedis(t.Context(), external)
	require.ErrorContains(t, err, "NOAUTH")
}

func TestPostgresSharedMemory(t *testing.T) {
	s := testmain.Serve(t, testbed.StartPostgres, &testbed.Options{Provider: testbed.Local})
	var dir string
	conn, err := pgx.Connect(t.Context(), s.URL)
	require.NoError(t, err)
	require.NoError(t, errors.Join(conn.QueryRow(t.Context(), "SHOW data_directory").Scan(&dir), conn.Close(t.Context())))
	text, err := os.ReadFile(filepath.Join(dir, "postmaster.pid"))
	require.NoError(t, err)
	id := strings.Fields(string(text))[6]
	require.NotEmpty(t, entries(t, filepath.Join(dir, "pg_dynshmem")), "the other shared memory goes with its directory")
	require.NoError(t, s.Close())
	_, failed := errors.AsType[*exec.ExitError](exec.CommandContext(t.Context(), "ipcrm", "-m", id).Run())
	require.True(t, failed, "ipcrm -m %s found something to remove", id)
}

func TestPostgresInitFails(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(dir+"/initdb", []byte("#!/bin/sh\necho cannot; exit 3\n"), 0o700)) //nolint:gosec // a program
	require.NoError(t, os.WriteFile(dir+"/postgres", nil, 0o700))                                      //nolint:gosec // a program
	t.Setenv("FENCELAB_POSTGRES_SERVER", dir+"/postgres")
	_, err := testbed.StartPostgres(t.Context(), &testbed.Options{Provider: testbed.Local})
	require.ErrorContains(t, err, "(exit status 3): cannot")
}
