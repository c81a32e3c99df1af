package testbed

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

var postgres = serverType{
	name: "postgres", title: "PostgreSQL", image: "postgres:15.10-bookworm", ports: []int{5432}, data: "/var/lib/postgresql/data",
	program: "postgres", apt: "postgresql", brew: "postgresql@15", // whose programs Homebrew doesn't link
	dirs:    []string{"/usr/lib/postgresql/*/bin", "/opt/homebrew/opt/postgresql@15/bin", "/usr/local/opt/postgresql@15/bin"},
	url:     "postgres://postgres@%s/postgres?sslmode=disable",
	schemes: []string{"postgres", "postgresql"},
	command: postgresCommand,
	ready:   postgresReady,
}

// StartPostgres starts a PostgreSQL with the user and database postgres, without a password.
func StartPostgres(ctx context.Context, o *Options) (*Server, error) {
	return startSingle(ctx, &postgres, o)
}

// postgresScript runs postgres in the data directory $0, which $1, initdb, creates. As root it changes to the image's user. Only
// this machine can reach the container's network.
const postgresScript = `cd "$0"
if [ "$(id -u)" = 0 ]; then
	chown postgres . && chmod 700 .
	as='setpriv --reuid=postgres --regid=postgres --init-groups'
fi
if [ ! -s PG_VERSION ]; then
	$as "$1" --username=postgres --auth=trust --encoding=UTF8 --locale=C --no-sync --no-instructions -D "$0" >&2
	echo 'host all all all trust' >>pg_hba.conf
fi
shift
exec $as "$@"`

func postgresCommand(ctx context.Context, at placement) (command, error) {
	initdb, server := "initdb", "postgres"
	var as []string
	if at.Provider == Local {
		initdb, server = filepath.Join(filepath.Dir(at.Path), initdb), at.Path
		var err error
		if as, err = unprivileged(ctx, at.Dir); err != nil {
			return command{}, err
		}
	}
	argv := slices.Concat(as, []string{
		"sh", "-ec", postgresScript, at.Dir, initdb,
		server, "-D", at.Dir, "-p", strconv.Itoa(at.me().Ports[0]), "-c", "listen_addresses=" + at.Listen,
		"-c", "unix_socket_directories=", "-c", "max_connections=1000",
		"-c", "fsync=off",
		"-c", "dynamic_shared_memory_type=mmap", // in files of its directory, so that nothing survives a SIGKILL
	}, at.More)
	return command{Path: argv[0], Args: argv}, nil
}

// unprivileged returns a command prefix that runs a program as a user other than root, as PostgreSQL demands, in the same process
// and with access to dir; empty if this process isn't root's.
//
// In a user namespace root has another name and keeps its files. Elsewhere, as in many containers, another user gets dir and the
// capability to enter root's directories. setpriv sets the parent-death signal again.
func unprivileged(ctx context.Context, dir string) ([]string, error) {
	if os.Geteuid() != 0 {
		return nil, nil
	}
	const (
		die   = "--pdeathsig=KILL"
		reach = "-all,+dac_override" // root's power to enter any directory
	)
	if _, err := exec.LookPath("setpriv"); err != nil {
		return nil, fmt.Errorf("PostgreSQL refuses to run as root: run this as another user, or: apt-get install util-linux: %w", err)
	}
	other, err := user.Lookup("postgres") // initdb requires an existing user
	if err != nil {
		other, err = user.Lookup("nobody")
	}
	if err != nil {
		return nil, fmt.Errorf("PostgreSQL refuses to run as root, and this machine has no user postgres or nobody: %w", err)
	}
	namespace := []string{"unshare", "--user", "--map-user=" + other.Uid, "--map-group=" + other.Gid}
	if exec.CommandContext(ctx, namespace[0], append(namespace[1:], "true")...).Run() == nil {
		return append(namespace, "setpriv", die), nil
	}
	uid, uidErr := strconv.Atoi(other.Uid)
	gid, gidErr := strconv.Atoi(other.Gid)
	if err := cmp.Or(uidErr, gidErr, os.Chown(dir, uid, gid)); err != nil {
		return nil, fmt.Errorf("PostgreSQL refuses to run as root, and its directory can't be given to %s: %w", other.Username, err)
	}
	return []string{
		"setpriv", "--reuid=" + other.Uid, "--regid=" + other.Gid, "--clear-groups", "--inh-caps=" + reach, "--ambient-caps=" + reach, die,
	}, nil
}

// postgresReady returns the version. It also marks a local process's shared memory segment for removal: a killed server would
// leak it.
func postgresReady(ctx context.Context, _, url string, local bool) (string, error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return "", err
	}
	defer func() { _ = conn.Close(context.WithoutCancel(ctx)) }()
	var version, dir string
	err = conn.QueryRow(ctx, "SELECT current_setting('server_version'), current_setting('data_directory')",
		pgx.QueryExecModeSimpleProtocol).Scan(&version, &dir)
	if err != nil {
		return "", err
	}
	version, _, _ = strings.Cut(version, " ") // 15.20 (Debian 15.20-0+deb12u1)
	if !local {
		return version, nil
	}
	// Lines: process id, data directory, start time, port, socket directory, address, shared memory key and id.
	text, err := os.ReadFile(filepath.Join(dir, "postmaster.pid"))
	if err != nil {
		return "", err
	}
	lines := strings.Split(string(text), "\n")
	if len(lines) < 7 {
		return "", fmt.Errorf("it is starting: %q", text)
	}
	_, id, _ := strings.Cut(strings.TrimSpace(lines[6]), " ")
	if out, err := exec.CommandContext(ctx, "ipcrm", "-m", strings.TrimSpace(id)).CombinedOutput(); err != nil {
		return "", fmt.Errorf("ipcrm: %w: %s", err, out)
	}
	return version, nil
}
