package testbed

import (
	"context"
	"strconv"
)

var s3 = serverType{
	name: "s3", title: "S3 server", image: "versity/versitygw:v1.8.0", ports: []int{7070}, data: "/data",
	program: "versitygw", module: "versitygw",
	url: awsURL, schemes: awsSchemes, accept: acceptAWS,
	command: func(_ context.Context, at placement) (command, error) {
		var args []string
		if at.Provider == Local {
			args = []string{"versitygw"} // in a container it is the entrypoint
		}
		args = append(args, "--quiet", "--keep-alive", "--port", at.Listen+":"+strconv.Itoa(at.me().Ports[0]),
			"--access", awsID, "--secret", awsSecret, "--region", awsRegion)
		args = append(args, at.More...)
		return command{Args: append(args, "posix", at.Dir)}, nil
	},
	ready: readyAWS,
}

// StartS3 starts versitygw, an S3 server on files. Version is the server's name.
func StartS3(ctx context.Context, o *Options) (*Server, error) { return startSingle(ctx, &s3, o) }
