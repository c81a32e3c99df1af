package testbed

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelab/fencelab/internal/proc"
)

// Names of the environment variables that choose a PostgreSQL.
const (
	EnvPostgresImage  = "FENCELAB_POSTGRES_IMAGE"
	EnvPostgresServer = "FENCELAB_POSTGRES_SERVER" // the path of postgres, beside which there is initdb
	EnvPostgresAddr   = "FENCELAB_POSTGRES_ADDR"   // host:port, or a postgres:// URL
)

// PostgresImage is the image that containers run unless FENCELAB_POSTGRES_IMAGE names another.
const PostgresImage = "postgres:15.10-bookworm"

var postgresKind = kind{
	name: "postgres", title: "PostgreSQL", env: "POSTGRES",
	image: PostgresImage, ports: []int{5432}, data: "/var/lib/postgresql/data",
	timeout:  time.Minute, // 0.1 s is usual; in a container, 1 s with initdb
	want:     "host:port or postgres:// URL",
	url:      postgresURL,
	programs: []string{"postgres"}, dirs: []string{"/usr/lib/postgresql/*/bin"}, // which Debian keeps out of PATH
	apt: "postgresql", brew: "postgresql@15",
	ready: func(ctx context.Context, addr string, pid int) (string, error) {
		return postgresReady(ctx, postgresURL(addr), pid)
	},
	external: findExternalPostgres,
}

// StartPostgres starts a PostgreSQL, or finds the external one, and returns once it answers. Its user and its database
// are called postgres, and there is no password. Killed and restarted, it keeps its data; it would not survive a power
// cut (fsync=off). The rest is as [StartRedis] says.
func StartPostgres(ctx context.Context, o *Options) (*Server, error) {
	c, err := start(ctx, &group{kind: &postgresKind, names: []string{"postgres"}, command: postgresCommand}, o)
	if err != nil {
		return nil, err
	}
	return c.Servers[0], nil
}

func postgresURL(addr string) string {
	return "postgres://postgres@" + addr + "/postgres?sslmode=disable"
}

// initdb makes an empty database cluster, in which those who come from the loopback interface are trusted.
var initdb = []string{
	"initdb", "--username=postgres", "--auth=trust", "--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions",
}

// postgresScript runs its arguments as the user that an image has for PostgreSQL, in the data directory $0, which it
// fills if need be. Clients come from the container's network; the engine lets none in but from this machine.
var postgresScript = `cd "$0"
if [ "$(id -u)" = 0 ]; then
	chown postgres . && chmod 700 .
	as='setpriv --reuid=postgres --regid=postgres --init-groups'
fi
if [ ! -s PG_VERSION ]; then
	$as ` + strings.Join(initdb, " ") + ` -D "$0" >&2
	echo 'host all all all trust' >>pg_hba.conf
fi
exec $as "$@"`

func postgresCommand(ctx context.Context, at place) (command, error) {
	args := append([]string{
		"postgres", "-D", at.Dir, "-p", strconv.Itoa(at.me().Ports[0]), "-c", "listen_addresses=" + at.Listen,
		"-c", "unix_socket_directories=", "-c", "max_connections=300",
		"-c", "fsync=off", // data need to survive a kill, not a power cut
		"-c", "dynamic_shared_memory_type=mmap", // in files of its directory, so that nothing outlives a SIGKILL
	}, at.More...)
	if at.Provider == Containers {
		return command{Args: slices.Concat([]string{"sh", "-ec", postgresScript, at.Dir}, args)}, nil
	}
	own, err := unprivileged(ctx, at.Dir)
	if err != nil {
		return command{}, err
	}
	if _, err := os.Stat(filepath.Join(at.Dir, "PG_VERSION")); errors.Is(err, fs.ErrNotExist) {
		argv := slices.Concat(own, initdb, []string{"-D", at.Dir})
		argv[len(own)] = filepath.Join(filepath.Dir(at.Path), initdb[0])
		if err := runToEnd(ctx, argv); err != nil {
			return command{}, err
		}
	}
	if len(own) == 0 {
		return command{Args: args}, nil
	}
	args[0] = at.Path
	return command{Path: own[0], Args: append(own, args...)}, nil
}

// unprivileged returns the beginning of a command line that runs a program as somebody else than root, as PostgreSQL
// demands, as the same process, and with dir as its own. It is empty if this process isn't root's.
//
// Another user couldn't reach a temporary directory of root's. In a user namespace of its own, root is called otherwise, while
// files and signals stay root's. Where there are no user namespaces, as in many containers and under chroot, it is another user
// all the same, to whom dir is given, and who can reach it. The change of credentials drops the parent-death signal, which is hence set anew.
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
	other, err := user.Lookup("postgres") // initdb wants one that there is
	if err != nil {
		other, err = user.Lookup("nobody")
	}
	if err != nil {
		return nil, fmt.Errorf("PostgreSQL refuses to run as root, and there is nobody else: %w", err)
	}
	spaces := []string{"unshare", "--user", "--map-user=" + other.Uid, "--map-group=" + other.Gid}
	if exec.CommandContext(ctx, spaces[0], append(spaces[1:], "true")...).Run() == nil {
		return lookedUp(append(spaces, "setpriv", die))
	}
	uid, uidErr := strconv.Atoi(other.Uid)
	gid, gidErr := strconv.Atoi(other.Gid)
	if err := cmp.Or(uidErr, gidErr, os.Chown(dir, uid, gid)); err != nil {
		return nil, fmt.Errorf("PostgreSQL refuses to run as root, and %s can't have its directory: %w", other.Username, err)
	}
	return lookedUp([]string{
		"setpriv", "--reuid=" + other.Uid, "--regid=" + other.Gid, "--clear-groups", "--inh-caps=" + reach, "--ambient-caps=" + reach, die,
	})
}

// lookedUp is a command line whose program is given by its path.
func lookedUp(argv []string) (_ []string, err error) {
	argv[0], err = exec.LookPath(argv[0])
	return argv, err
}

// runToEnd runs a command whose output is of interest only if it fails.
func runToEnd(ctx context.Context, argv []string) error {
	var out bytes.Buffer
	cmd := exec.Command(argv[0], argv[1:]...) //nolint:noctx // proc ends all that it starts, and not the command alone
	cmd.Stdout, cmd.Stderr = &out, &out
	p, err := proc.Start(cmd)
	if err != nil {
		return fmt.Errorf("testbed: %w", err)
	}
	select {
	case <-p.Exited():
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), p.Kill())
	}
	if err := p.Wait(); err != nil {
		return fmt.Errorf("testbed: %s: %w: %s", strings.Join(argv, " "), err, tail(out.Bytes()))
	}
	return nil
}

// postgresReady asks the server for its version. If it is a process of this machine, whose id is pid, it also has the
// system remove its shared memory segment, which guards the data directory, once no process uses it any more: a killed
// server would leave it for ever, and a system has room for few.
func postgresReady(ctx context.Context, url string, pid int) (string, error) {
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
	if pid == 0 {
		return version, nil
	}
	// The lines are: process id, data directory, start time, port, socket directory, address, shared memory key and id.
	text, err := os.ReadFile(filepath.Join(dir, "postmaster.pid"))
	if err != nil {
		return "", err
	}
	lines := strings.Split(string(text), "\n")
	if lines[0] != strconv.Itoa(pid) {
		return "", fmt.Errorf("%s is another server's, of process %s", url, lines[0]) // ours is about to fail to bind
	}
	if len(lines) < 7 {
		return "", fmt.Errorf("it is starting: %q", text)
	}
	_, id, _ := strings.Cut(strings.TrimSpace(lines[6]), " ")
	if out, err := exec.CommandContext(ctx, "ipcrm", "-m", strings.TrimSpace(id)).CombinedOutput(); err != nil {
		return "", fmt.Errorf("ipcrm: %w: %s", err, out)
	}
	return version, nil
}

func findExternalPostgres(ctx context.Context, k *kind, set string) ([]*Server, error) {
	if !strings.Contains(set, "://") {
		set = postgresURL(set)
	}
	// Errors of a parser may quote the URL, and with it a password.
	u, err := url.Parse(set)
	if err != nil || u.Scheme != "postgres" && u.Scheme != "postgresql" || u.Host == "" {
		return nil, fmt.Errorf("%s is neither host:port nor a postgres:// URL", k.envAddr())
	}
	version, err := postgresReady(ctx, set, 0)
	if err != nil {
		return nil, fmt.Errorf("the server at %s (%s) does not answer: %w", u.Host, k.envAddr(), err)
	}
	return []*Server{{Addr: u.Host, URL: set, Version: version}}, nil
}
