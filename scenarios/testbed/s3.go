package testbed

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
)

// Names of the environment variables that choose an S3 server.
const (
	EnvS3Image  = "FENCELAB_S3_IMAGE"
	EnvS3Server = "FENCELAB_S3_SERVER" // the path of versitygw
	EnvS3Addr   = "FENCELAB_S3_ADDR"   // host:port, or an http:// or https:// URL, with the credentials or else those of AWS_ACCESS_KEY_ID
)

// S3Image is the image that containers run unless FENCELAB_S3_IMAGE names another.
const S3Image = "versity/versitygw:v1.8.0"

var s3Kind = kind{
	name: "s3", title: "S3 server", env: "S3",
	image: S3Image, ports: []int{7070}, data: "/data",
	timeout:  time.Minute, // 40 ms are usual
	want:     "host:port or http:// URL",
	url:      withCredentials,
	programs: []string{"versitygw"}, module: "versitygw",
	ready: func(ctx context.Context, addr string, _ int) (string, error) {
		u, err := url.Parse(withCredentials(addr))
		if err != nil {
			return "", err
		}
		return s3Ready(ctx, u)
	},
	external: func(ctx context.Context, k *kind, set string) ([]*Server, error) {
		return findExternalAWS(ctx, k, set, s3Ready)
	},
}

// StartS3 starts a versitygw, an S3 server that keeps objects in files, or finds the external server, and returns once it
// answers. Server.URL has the credentials. Killed and restarted, it keeps its objects; it would not survive a power cut, for
// it doesn't sync them. Its Version is what the server calls itself: S3 has no request that asks for one. The rest is as
// [StartRedis] says.
func StartS3(ctx context.Context, o *Options) (*Server, error) {
	c, err := start(ctx, &group{kind: &s3Kind, names: []string{"s3"}, command: s3Command}, o)
	if err != nil {
		return nil, err
	}
	return c.Servers[0], nil
}

func s3Command(_ context.Context, at place) (command, error) {
	var args []string
	listen := at.Listen
	if at.Provider == Local {
		args = []string{"versitygw"} // in a container it is the entrypoint
	}
	args = append(args, "--quiet", "--keep-alive", "--port", listen+":"+strconv.Itoa(at.me().Ports[0]),
		"--access", awsID, "--secret", awsSecret, "--region", awsRegion)
	args = append(args, at.More...)
	return command{Args: append(args, "posix", at.Dir)}, nil
}

// s3Ready asks for the buckets, which takes the right credentials.
func s3Ready(ctx context.Context, u *url.URL) (string, error) {
	status, answer, version, err := askAWS(ctx, u, "s3", http.MethodGet, "", nil)
	if err == nil && (status != http.StatusOK || !strings.Contains(answer, "<ListAllMyBucketsResult")) {
		err = fmt.Errorf("asked for the buckets, it answered %d: %.300s", status, answer)
	}
	return version, err
}
