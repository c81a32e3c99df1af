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

	"github.com/fencelab/fencelab/scenarios/testbed"
)

// A life is what requireLife needs to know of a kind of server.
type life struct {
	start func(ctx context.Context, o *testbed.Options) (*testbed.Server, error)
	args  []string // of which put or get fails without them
	// version is what the server's version looks like, as a regular expression; empty: numbers with points between.
	version string
	// volatile says that it loses everything when it is killed.
	volatile bool
	// put stores something, and get says whether it is still there. Both connect anew.
	put func(ctx context.Context, s *testbed.Server) error
	get func(ctx context.Context, s *testbed.Server) (bool, error)
}

// requireLife starts a server, freezes, kills, restarts, wipes and closes it, and looks at it from outside.
func requireLife(t *testing.T, p testbed.Provider, l life) {
	t.Helper()
	s, err := l.start(t.Context(), &testbed.Options{Provider: p, Args: l.args})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	require.Equal(t, p, s.Provider)
	require.Regexp(t, cmp.Or(l.version, `^\d+\.\d+(\.\d+)?$`), s.Version)
	require.True(t, strings.HasSuffix(s.String(), " "+s.Version+" ("+string(p)+")"), s.String())
	require.NoError(t, l.put(t.Context(), s))
	requireKept := func(want bool) {
		t.Helper()
		kept, err := l.get(t.Context(), s)
		require.NoError(t, err)
		require.Equal(t, want, kept)
	}
	requireKept(true)

	heal, err := s.Pause(t.Context())
	require.NoError(t, err)
	after := during(t, func() error { // its request waits in a socket of the frozen server
		kept, err := l.get(t.Context(), s)
		if err == nil && !kept {
			err = errors.New("it is gone")
		}
		return err
	})
	require.NoError(t, heal(t.Context()))
	after()

	addr := s.Addr
	require.NoError(t, s.Kill(t.Context()))
	requireGone(t, addr)
	require.NoError(t, s.Restart(t.Context(), testbed.RestartOptions{}))
	require.Equal(t, addr, s.Addr)
	requireKept(!l.volatile)

	require.NoError(t, s.Kill(t.Context()))
	require.NoError(t, s.Restart(t.Context(), testbed.RestartOptions{Wipe: true}))
	require.Equal(t, addr, s.Addr)
	requireKept(false)

	require.NoError(t, s.Close())
	requireGone(t, addr)
	require.NoError(t, s.Close(), "Close again")
}

// onPostgres connects for as long as f takes.
func onPostgres(ctx context.Context, s *testbed.Server, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return err
	}
	return errors.Join(f(conn), conn.Close(ctx))
}

func TestPostgres(t *testing.T) {
	onProviders(t, "postgres", func(t *testing.T, p testbed.Provider) {
		requireLife(t, p, life{
			start: testbed.StartPostgres,
			args:  []string{"-c", "event_source=more"},
			put: func(ctx context.Context, s *testbed.Server) error {
				return onPostgres(ctx, s, func(conn *pgx.Conn) error {
					_, err := conn.Exec(ctx, `CREATE TABLE kept AS SELECT 1`)
					return err
				})
			},
			get: func(ctx context.Context, s *testbed.Server) (kept bool, err error) {
				err = onPostgres(ctx, s, func(conn *pgx.Conn) error {
					return conn.QueryRow(ctx, `SELECT to_regclass('kept') IS NOT NULL AND
						current_setting('event_source') = 'more'`).Scan(&kept)
				})
				return kept, err
			},
		})
	})
}

func TestPostgresThatEnds(t *testing.T) {
	onProviders(t, "postgres", func(t *testing.T, p testbed.Provider) {
		_, err := testbed.StartPostgres(t.Context(), &testbed.Options{Provider: p, Args: []string{"-c", "no_such_setting=1"}})
		require.ErrorContains(t, err, "exit")
		require.ErrorContains(t, err, "no_such_setting", "its log is in the error")
	})
}

// A server that was killed can't remove its shared memory, which no file system shows.
func TestPostgresSharedMemory(t *testing.T) {
	s, err := testbed.StartPostgres(t.Context(), &testbed.Options{Provider: testbed.Local})
	testbed.Need(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	var dir string
	require.NoError(t, onPostgres(t.Context(), s, func(conn *pgx.Conn) error {
		return conn.QueryRow(t.Context(), "SHOW data_directory").Scan(&dir)
	}))
	text, err := os.ReadFile(filepath.Join(dir, "postmaster.pid"))
	require.NoError(t, err)
	id := strings.Fields(string(text))[6]
	require.NotEmpty(t, entries(t, filepath.Join(dir, "pg_dynshmem")), "the other shared memory goes with its directory")
	left := func() bool {
		err := exec.CommandContext(t.Context(), "ipcrm", "-m", id).Run()
		_, failed := errors.AsType[*exec.ExitError](err)
		require.True(t, err == nil || failed, err)
		return err == nil
	}
	require.NoError(t, s.Close())
	require.False(t, left(), "ipcrm -m %s found something to remove", id)
}

// The directory isn't one in which a database can be made.
func TestPostgresInitFails(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(dir+"/initdb", []byte("#!/bin/sh\necho cannot; exit 3\n"), 0o700)) //nolint:gosec // a program
	require.NoError(t, os.WriteFile(dir+"/postgres", nil, 0o700))                                      //nolint:gosec // a program
	t.Setenv(testbed.EnvPostgresServer, dir+"/postgres")
	_, err := testbed.StartPostgres(t.Context(), &testbed.Options{Provider: testbed.Local})
	require.ErrorContains(t, err, "exit status 3: cannot")
}

func TestPostgresExternal(t *testing.T) {
	users, err := testbed.StartPostgres(t.Context(), &testbed.Options{Provider: testbed.Local})
	testbed.Need(t, err)
	defer func() { require.NoError(t, users.Close()) }()
	for _, tc := range []struct{ name, addr, err string }{
		{"Unset", "", "FENCELAB_POSTGRES_ADDR is not set: set it to the host:port or postgres:// URL of your server"},
		{"Addr", users.Addr, ""},
		{"URL", strings.Replace(users.URL, "postgres@", "postgres:secret@", 1), ""},
		{"NobodyThere", "postgres://postgres:secret@127.0.0.1:1/postgres", "the server at 127.0.0.1:1 (FENCELAB_POSTGRES_ADDR) does not answer"},
		{"OtherScheme", "http://:secret@localhost", "is neither host:port nor a postgres:// URL"},
		{"NoURL", "postgres://:secret@local host", "is neither host:port nor a postgres:// URL"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Setenv(testbed.EnvPostgresAddr, tc.addr)
			s, err := testbed.StartPostgres(t.Context(), &testbed.Options{Provider: testbed.External})
			if tc.err != "" {
				require.ErrorContains(t, err, tc.err)
				require.NotContains(t, err.Error(), "secret")
				return
			}
			require.NoError(t, err)
			require.Equal(t, users.Addr, s.Addr)
			require.Equal(t, users.Version, s.Version)
			_, err = s.Pause(t.Context())
			require.ErrorIs(t, err, errors.ErrUnsupported)
			require.NoError(t, s.Close())
			require.NoError(t, onPostgres(t.Context(), s, func(conn *pgx.Conn) error { return conn.Ping(t.Context()) }),
				"Close leaves the user's server alone")
		})
	}
}
